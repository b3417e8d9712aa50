"""Connections of two ranks that meet in a key-value store: bytes, strangers, ends and deadlines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import select
import socket
import time
from collections.abc import Callable

import pytest

from cxlfs.errors import JobLinkError
from cxlfs.job.engines import callers, sockets
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
    monkeypatch.setattr(sockets, "_BEYOND", ())
    monkeypatch.setattr(sockets, "_of_interfaces", list)
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
        host, port, *_ = MemoryStore(shelf).multi_get(["copies/1/at"])[0].decode().split()
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
        told = f"127.0.0.1 {port} {'ab' * 16}{'cd' * 16} {sockets._here()}"
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


def a_stranger_who_says_a_byte_now_and_then_holds_up_nobody() -> None:
    """Others who say nothing beside: all of them are there before the right one comes."""
    shelf = Shelf()
    calling: list[socket.socket] = []

    def strangers() -> None:
        host, port, *_ = MemoryStore(shelf).multi_get(["copies/1/at"])[0].decode().split()
        for said in (b"x", b"", b"xx", b""):
            calling.append(socket.create_connection((host, int(port)), SECONDS))
            calling[-1].sendall(said)

    begun = time.monotonic()
    below, above = met(shelf, strangers)
    taken = time.monotonic() - begun
    for one in (*calling, below, above):
        if isinstance(one, SocketLink):
            one.close(is_done=True)
        elif isinstance(one, socket.socket):
            one.close()
    assert isinstance(below, SocketLink)
    assert isinstance(above, SocketLink)
    assert taken < callers.WORD_SECONDS, "a stranger was waited for"


def test_a_caller_has_one_deadline_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte each time that it is looked at: it is sent away all the same."""
    monkeypatch.setattr(callers, "WORD_SECONDS", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        callers.Callers(server, b"right word here!") as heard,
        socket.create_connection(server.getsockname()) as stranger,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(heard.wait, time.monotonic() + 2.0)
        with contextlib.suppress(OSError):
            while not waiting.done():
                stranger.sendall(b"r")
                time.sleep(0.1)
                if select.select([stranger], [], [], 0)[0]:
                    break
        assert not waiting.done(), "it was sent away before the end of the listener"
        with pytest.raises(TimeoutError):
            waiting.result()


def test_more_callers_than_are_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes, and the right one is heard."""
    monkeypatch.setattr(callers, "CALLERS_MAX", 4)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        callers.Callers(server, b"right") as heard,
        contextlib.ExitStack() as calling,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        for _ in range(20):
            calling.enter_context(socket.create_connection(server.getsockname()))
        waiting = thread.submit(heard.wait, time.monotonic() + SECONDS)
        right = calling.enter_context(socket.create_connection(server.getsockname()))
        right.sendall(b"right")
        found = calling.enter_context(waiting.result())
        assert found.getpeername() == right.getsockname()


def test_a_port_that_does_not_answer_costs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def silent(address: object, *_: object) -> None:
        tried.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(sockets, "_unreached", {})
    for _ in range(3):
        assert met(Shelf()) == [None, None]
    assert len(tried) == 1


# --- addresses ----------------------------------------------------------------------------------


def resolved(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    original = socket.getaddrinfo

    def look_up(name: str, *given: object, **how: object) -> object:
        return original(names.get(name, name), *given, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_a_name_of_this_machine_that_is_loopback_is_not_told_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian writes it into /etc/hosts: 127.0.1.1 node0."""
    resolved(monkeypatch, node0="127.0.1.1")
    monkeypatch.setattr(sockets, "_BEYOND", ())
    monkeypatch.setattr(sockets, "_of_interfaces", lambda: ["127.0.0.1", "198.51.100.7"])
    assert sockets.own_address(("node0", "node0")) == "198.51.100.7"
    assert sockets.own_address(("node0", "localhost")).startswith("127.")
    assert sockets.own_address(("node0", "127.0.0.1")).startswith("127.")
    monkeypatch.setattr(sockets, "_of_interfaces", lambda: ["127.0.0.1"])
    assert sockets.own_address(("node0", "node0")).startswith("127."), "there is no other"


def test_loopback_of_another_host_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be somebody else's here: both ends take another way."""
    here = sockets._here
    first: list[str] = []

    def elsewhere() -> str:
        first.append("")
        return here() if len(first) == 1 else "another host"

    monkeypatch.setattr(sockets, "_here", elsewhere)
    assert met(Shelf()) == [None, None]


STRANGERS = [strangers_are_sent_away, who_answers_is_asked_for_the_word]
ALL = [*STRANGERS, a_stranger_who_says_a_byte_now_and_then_holds_up_nobody]


@pytest.mark.parametrize("test", ALL)
def test_strangers(test: Callable[[], None]) -> None:
    test()


@pytest.mark.parametrize("test", STRANGERS)
def test_that_strangers_are_believed_is_found(
    test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake."""
    for module in (sockets, callers):
        monkeypatch.setattr(module.hmac, "compare_digest", lambda *_: True)
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
