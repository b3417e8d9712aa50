"""The control socket: what it answers, whom it refuses, and how it survives bad requests."""

# ruff: noqa: ARG001  handlers are given more than they need

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import trio

from cxlfs.control import client, discovery
from cxlfs.control.client import (
    AWAIT_CLOSE,
    NoDaemonError,
    ask,
    connect,
    control_request,
    find_and_connect,
)
from cxlfs.daemon import control_server, runtime
from cxlfs.daemon.callers import Caller, caller_of
from cxlfs.errors import BusyError, CxlfsError, MountError, NotPermittedError, UsageError
from cxlfs.store import Store
from tests.support.fuse_api import Kernel

Messages = list[dict[str, object]]


def slices(
    store: Store, parameters: Mapping[str, object], caller: Caller
) -> Iterator[dict[str, object]]:
    for index in range(int(str(parameters["count"]))):
        yield {"message_type": "slice", "index": index}


def refuse(
    store: Store, parameters: Mapping[str, object], caller: Caller
) -> Iterator[dict[str, object]]:
    yield {"message_type": "first"}
    raise BusyError("not now", next_step="later")


def fail(
    store: Store, parameters: Mapping[str, object], caller: Caller
) -> Iterator[dict[str, object]]:
    raise KeyError("a defect")
    yield {}


class Served:
    """A control server of ``kernel`` and a way to talk to it from another thread."""

    def __init__(self, kernel: Kernel, path: Path) -> None:
        self.path = path
        self.server = control_server.ControlServer(kernel.store, kernel.operations)
        for name, handler in (("slices", slices), ("refuse", refuse), ("fail", fail)):
            self.server.register(name, handler)
        self.server.listen(path)

    async def talk(self, conversation: Callable[[], None]) -> None:
        """Run ``conversation`` in a thread while the server answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.server.serve)
            with trio.fail_after(20):
                await trio.to_thread.run_sync(conversation)
            nursery.cancel_scope.cancel()

    def ask(self, request: str, **parameters: object) -> Messages:
        with connect(self.path) as channel:
            return list(ask(channel, request, parameters, seconds_max=10))

    def raw(self, line: bytes) -> dict[str, object]:
        with connect(self.path) as channel:
            channel.sendall(line)
            channel.shutdown(socket.SHUT_WR)
            with channel.makefile("rb") as lines:
                answer: dict[str, object] = json.loads(lines.readline())
                return answer


@pytest.fixture
def served(kernel: Kernel, tmp_path: Path) -> Iterator[Served]:
    deep = tmp_path / ("d" * 120)  # longer than a socket's address may be
    deep.mkdir()
    server = Served(kernel, deep / "x.sock")
    yield server
    assert server.server._channel is not None
    server.server._channel.close()


async def test_status_and_list(served: Served, kernel: Kernel) -> None:
    kernel.write_file(b"a", bytes(1000))
    kernel.write_file(b"\xff", b"x")

    def conversation() -> None:
        (status,) = served.ask("status")
        assert status["state"] == "ONLINE"
        assert status["files"] == 2
        assert len(str(status["uuid"])) == 36
        assert isinstance(status["recovery"], dict)
        entries = served.ask("list")
        assert [os.fsencode(str(entry["path"])) for entry in entries] == [b"/a", b"/\xff"]
        assert entries[0]["size_bytes"] == 1000
        with pytest.raises(CxlfsError, match="no such path"):
            served.ask("list", path="/none")
        with pytest.raises(UsageError):
            served.ask("list", path=5)

    await served.talk(conversation)


async def test_a_long_answer_leaves_room_for_others(served: Served) -> None:
    """Two answers are given at the same time, in turns."""
    reached = threading.Event()

    def conversation() -> None:
        with connect(served.path) as channel:
            answer = ask(channel, "slices", {"count": 200_000}, seconds_max=10)
            assert next(answer)["index"] == 0
            assert served.ask("slices", count=3)[-1]["index"] == 2
            reached.set()

    await served.talk(conversation)
    assert reached.is_set()


async def test_errors_arrive_and_the_socket_lives_on(served: Served, kernel: Kernel) -> None:
    def conversation() -> None:
        with connect(served.path) as channel:
            answer = ask(channel, "refuse", {}, seconds_max=10)
            assert next(answer) == {"message_type": "first"}
            with pytest.raises(BusyError, match="not now") as caught:
                next(answer)
            assert caught.value.next_step == "later"
        with pytest.raises(UsageError, match="not known"):
            served.ask("nothing")
        with pytest.raises(CxlfsError, match="KeyError"):
            served.ask("fail")
        assert served.ask("slices", count=1)

    await served.talk(conversation)
    assert kernel.operations.failures.counts == {"control request: KeyError": 1}
    assert kernel.store.read_only
    kernel.operations.failures.counts.clear()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"no json\n",
        b"[]\n",
        b"{}\n",
        b'{"request": 5}\n',
        b'{"request": "status", "parameters": []}\n',
        b'{"request": "list", "parameters": {"path": "/\\ud800"}}\n',  # half a surrogate pair
        b'{"request": "status"',
        b"[" * 5000 + b"\n",
        b"\xff\xfe\n",
    ],
)
async def test_bad_requests_get_an_error(served: Served, line: bytes) -> None:
    def conversation() -> None:
        assert served.raw(line)["id"] == "usage"
        assert served.ask("status")

    await served.talk(conversation)


def send_much(channel: socket.socket) -> None:
    for _ in range(1000):
        channel.sendall(b"x" * 10_000)


async def test_requests_are_bounded(served: Served) -> None:
    def conversation() -> None:
        with connect(served.path) as channel, pytest.raises(OSError):
            send_much(channel)
        assert served.ask("status")

    await served.talk(conversation)


async def test_a_peer_that_goes_away_harms_nobody(served: Served) -> None:
    def conversation() -> None:
        for _ in range(3):
            with connect(served.path) as channel:
                next(ask(channel, "slices", {"count": 1_000_000}, seconds_max=10))
        assert served.ask("status")

    await served.talk(conversation)


def options_of(uid: int, groups: tuple[int, ...]) -> Callable[[int, int, int], bytes]:
    """What the kernel says of a peer: SO_PEERCRED, SO_PEERGROUPS."""

    def getsockopt(_level: int, option: int, _length: int) -> bytes:
        if option == socket.SO_PEERCRED:
            return struct.pack("3i", 1, uid, 50)
        return struct.pack(f"={len(groups)}I", *groups)

    return getsockopt


@pytest.mark.parametrize(("uid", "manages"), [(0, True), (1000, True), (1001, False)])
def test_root_and_the_daemons_user_may_ask_for_everything(
    monkeypatch: pytest.MonkeyPatch, uid: int, manages: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    caller = caller_of(options_of(uid, (7, 8)))
    assert caller.manages == manages
    assert caller.groups == (frozenset() if manages else {50, 7, 8})


async def test_others_are_refused_where_they_may_not_use_the_mount(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.path.stat().st_mode & 0o777 == 0o600
    stranger = Caller(1001, frozenset(), manages=False)
    monkeypatch.setattr(control_server, "caller_of", lambda _getsockopt: stranger)

    def converse() -> None:
        with pytest.raises(MountError, match="ended before it had answered"):
            served.ask("status")

    await served.talk(converse)


def wait_until(holds: Callable[[], object]) -> None:
    """Ask again and again, for 10 s at most."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestUsers:
    """Where they may use the mount."""

    @pytest.fixture(autouse=True)
    def let_in(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        served.server._lets_users_in = True
        stranger = Caller(1001, frozenset(), manages=False)
        monkeypatch.setattr(control_server, "caller_of", lambda _getsockopt: stranger)

    async def test_they_ask_for_what_is_of_users(self, served: Served) -> None:
        def converse() -> None:
            assert served.ask("status")[0]["state"]
            for request in ("slices", "nothing", AWAIT_CLOSE):
                with pytest.raises((NotPermittedError, UsageError)):
                    served.ask(request, count=1)

        await served.talk(converse)

    async def test_each_has_few_connections(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_server, "_CONNECTIONS_EACH_MAX", 1)

        def converse() -> None:
            with connect(served.path):
                wait_until(lambda: served.server._connections)
                with pytest.raises(BusyError, match="too many"):
                    served.ask("status")
            wait_until(lambda: not served.server._connections)
            assert served.ask("status")

        await served.talk(converse)

    async def test_one_who_says_nothing_is_let_go(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_server, "_READ_SECONDS_MAX", 0.01)

        def converse() -> None:
            with connect(served.path) as channel, channel.makefile() as lines:
                assert "no request came" in lines.readline()

        await served.talk(converse)


@pytest.mark.parametrize("error", [None, MountError("closing failed")])
async def test_who_waits_is_told_how_closing_went(served: Served, error: Exception | None) -> None:
    waiting = threading.Event()
    outcome: list[object] = []

    def wait() -> None:
        with connect(served.path) as channel:
            answer = ask(channel, AWAIT_CLOSE, {}, seconds_max=10)
            assert next(answer)["message_type"] == "waiting"
            waiting.set()
            try:
                outcome.append(list(answer))
            except CxlfsError as failure:
                outcome.append(str(failure))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.server.serve)
        nursery.start_soon(trio.to_thread.run_sync, wait)
        await trio.to_thread.run_sync(waiting.wait, 10)
        with trio.fail_after(10):
            await served.server.close(error, seconds_max=5)
        nursery.cancel_scope.cancel()
    assert outcome == [[] if error is None else "closing failed"]
    assert not served.path.exists()


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(discovery.ENVIRONMENT_OVERRIDE, str(tmp_path))
    with pytest.raises(NoDaemonError, match="no cxlfs daemon"):
        list(control_request("/nothing", "status"))
    runtime.register(
        tmp_path, discovery.Registration(uuid="u", pid=1, source="/nothing", mountpoint="/mnt/x")
    )
    with pytest.raises(NoDaemonError, match="is gone"):
        list(control_request("/nothing", "status"))


@pytest.mark.parametrize("answer", [b"", b"garbage\n", b"[]\n", b'{"a": 1}\n', b'{"message_type"'])
def test_a_daemon_that_talks_nonsense(answer: bytes) -> None:
    here, there = socket.socketpair()
    there.sendall(answer)
    there.shutdown(socket.SHUT_WR)
    with here, there, pytest.raises(MountError):
        list(ask(here, "status", {}, seconds_max=5))


def test_a_daemon_that_keeps_silent() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(MountError, match="does not answer"):
        list(ask(here, "status", {}, seconds_max=0.05))


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """The socket of a daemon that so many want to talk to that its queue has no room."""
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(str(path))
        listener.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                channel = waiting.enter_context(socket.socket(socket.AF_UNIX))
                channel.setblocking(False)
                channel.connect(str(path))
        yield path, listener


def test_whoever_finds_a_full_queue_waits(
    full: tuple[Path, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, listener = full
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        listener.accept()[0].close()

    monkeypatch.setattr(client.time, "sleep", wait)
    connect(path).close()
    assert len(waits) == 1


def test_a_daemon_whose_queue_stays_full_is_not_gone(
    full: tuple[Path, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told that it is gone would mount again."""
    registration = discovery.Registration(uuid="", pid=4711, source="/source", mountpoint="/mnt")
    monkeypatch.setattr(client, "find_daemons", lambda _: [(full[0], registration)])
    monkeypatch.setattr(client, "CONNECT_SECONDS_MAX", 0.001)
    with pytest.raises(MountError, match=r"process 4711.* too many ask it"):
        find_and_connect("/mnt")
