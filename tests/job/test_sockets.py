"""Connections of two ranks that meet in a key-value store: bytes, strangers, ends and deadlines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import socket
from collections.abc import Callable

import pytest

from cxlfs.errors import JobLinkError
from cxlfs.job.engines import sockets
from cxlfs.job.engines.sockets import SocketLink, meet
from tests.support.job_key_value import MemoryStore, Shelf

SECONDS = 30.0
HOST = "localhost"
MORE_THAN_FITS = bytearray(64 << 20)
"""Into the kernel's buffers."""
Ends = list[SocketLink | Exception | None]


def met(shelf: Shelf, before: Callable[[], None] = lambda: None, seconds: float = SECONDS) -> Ends:
    """What both ends have; ``before``: what is done when the one below listens."""

    def end(side: int) -> SocketLink | Exception | None:
        try:
            if side:
                before()
            return meet(MemoryStore(shelf), HOST, side, 1 - side, "copies/1", seconds)
        except JobLinkError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(2) as ends:
        return list(ends.map(end, range(2)))


def pair(seconds: float = SECONDS) -> tuple[SocketLink, SocketLink]:
    below, above = met(Shelf(), seconds=seconds)
    assert isinstance(below, SocketLink)
    assert isinstance(above, SocketLink)
    return below, above


def end_both(*links: object) -> None:
    for link in links:
        assert isinstance(link, SocketLink)
        link.close(is_done=True)


def assert_carries(one: SocketLink, other: SocketLink, data: bytes) -> None:
    """In pieces of other sizes than they were sent in."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        sent = thread.submit(lambda: one.send(memoryview(data)).wait())
        found = memoryview(bytearray(len(data)))
        for begin in range(0, len(data), 100_003):
            other.receive(found[begin : begin + 100_003]).wait()
        sent.result()
    assert found == data


def test_bytes_go_both_ways_and_nothing_is_left_in_the_store(rng: random.Random) -> None:
    shelf = Shelf()
    below, above = met(shelf)
    assert isinstance(below, SocketLink)
    assert isinstance(above, SocketLink)
    assert shelf.kept == {}
    data = rng.randbytes(20_000_000)
    assert_carries(below, above, data)
    assert_carries(above, below, data[:1])
    assert_carries(above, below, data)
    end_both(below, above)


@pytest.mark.parametrize("at", ["below", "above"])
def test_where_they_do_not_reach_each_other_both_know(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("unreachable")

    if at == "below":
        monkeypatch.setattr(sockets, "_address", refuse)
    else:
        monkeypatch.setattr(socket, "create_connection", refuse)
    shelf = Shelf()
    assert met(shelf) == [None, None]
    assert shelf.kept == {}


def test_what_gloo_is_to_encipher_goes_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    assert met(Shelf()) == [None, None]


def test_the_network_is_that_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert sockets._address("192.0.2.1") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cxlfs-none0")
    assert met(Shelf()) == [None, None]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.name.invalid")
    assert sockets._address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"."):
        sockets._address("no.such.host.invalid")


def last_word(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1)
    return b""


def strangers_are_sent_away() -> None:
    """One says a wrong word, one nothing, before the right one comes."""
    shelf = Shelf()
    calling: list[socket.socket] = []

    def strangers() -> None:
        host, port, _ = MemoryStore(shelf).multi_get(["copies/1/at"])[0].decode().split()
        for said in (b"x" * 16, b""):
            calling.append(socket.create_connection((host, int(port)), SECONDS))
            calling[-1].sendall(said)
            calling[-1].shutdown(socket.SHUT_WR)

    below, above = met(shelf, strangers)
    heard = [last_word(stranger) for stranger in calling]
    for one in (*calling, below, above):
        if isinstance(one, SocketLink):
            one.close(is_done=True)
        elif isinstance(one, socket.socket):
            one.close()
    assert heard == [b"", b""]
    assert isinstance(below, SocketLink)
    assert isinstance(above, SocketLink)


def who_answers_is_asked_for_the_word() -> None:
    """Another process may have got the port."""
    shelf = Shelf()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = f"127.0.0.1 {port} {'ab' * 16}{'cd' * 16}"
        MemoryStore(shelf).set("copies/1/at", told.encode())

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(16))

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            answered = thread.submit(answer)
            problem = ""
            try:
                link = meet(MemoryStore(shelf), HOST, 1, 0, "copies/1", SECONDS)
                end_both(link)
            except JobLinkError as error:
                problem = str(error)
            answered.result()
    assert "not the one" in problem


STRANGERS = [strangers_are_sent_away, who_answers_is_asked_for_the_word]


@pytest.mark.parametrize("test", STRANGERS)
def test_strangers(test: Callable[[], None]) -> None:
    test()


@pytest.mark.parametrize("test", STRANGERS)
def test_that_strangers_are_believed_is_found(
    test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake."""
    monkeypatch.setattr(sockets.hmac, "compare_digest", lambda *_: True)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()


def test_the_end_of_one_is_heard_by_the_other() -> None:
    below, above = pair()
    below.close(is_done=False)
    with pytest.raises(JobLinkError, match="rank 0: Connection closed by peer"):
        above.receive(bytearray(1))
    with pytest.raises(JobLinkError, match=r"rank 0: Connection (closed|reset) by peer"):
        above.send(MORE_THAN_FITS)
    above.close(is_done=False)


def test_what_was_said_before_the_end_is_heard() -> None:
    below, above = pair()
    below.send(bytearray(b"no room"))
    below.close(is_done=False)
    found = bytearray(7)
    above.receive(found)
    assert found == b"no room"
    above.close(is_done=False)


def test_nothing_waits_behind_its_time() -> None:
    below, above = pair(0.3)
    with pytest.raises(JobLinkError, match="rank 1: timed out"):
        below.receive(bytearray(1))
    with pytest.raises(JobLinkError, match="rank 0: timed out"):
        above.send(MORE_THAN_FITS)
    end_both(below, above)


def test_who_does_not_come_is_not_waited_for() -> None:
    late = MemoryStore(Shelf())
    late._seconds = 0.05
    with pytest.raises(RuntimeError, match="timed out"):
        meet(late, HOST, 0, 1, "copies/1", 0.05)
