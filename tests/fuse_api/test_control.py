"""The control socket: what it answers, whom it refuses, and how it survives bad requests."""

# ruff: noqa: ARG001  handlers are given more than they need

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
from cxlfs.errors import BusyError, CxlfsError, MountError, UsageError
from cxlfs.store import Store
from tests.support.fuse_api import Kernel

Messages = list[dict[str, object]]


def slices(store: Store, parameters: Mapping[str, object]) -> Iterator[dict[str, object]]:
    for index in range(int(str(parameters["count"]))):
        yield {"message_type": "slice", "index": index}


def refuse(store: Store, parameters: Mapping[str, object]) -> Iterator[dict[str, object]]:
    yield {"message_type": "first"}
    raise BusyError("not now", next_step="later")


def fail(store: Store, parameters: Mapping[str, object]) -> Iterator[dict[str, object]]:
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


class Peer:
    """Stands for a stream from a process of user ``uid``."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.socket = self

    def getsockopt(self, *_arguments: object) -> bytes:
        return struct.pack("3i", 1, self.uid, 1)


@pytest.mark.parametrize(("uid", "answered"), [(0, True), (1000, True), (1001, False)])
def test_only_the_owner_and_root_are_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch, uid: int, answered: bool
) -> None:
    assert served.path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    stream: Any = Peer(uid)
    if answered:
        control_server._check_peer(stream)
        return
    with pytest.raises(PermissionError):
        control_server._check_peer(stream)


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
