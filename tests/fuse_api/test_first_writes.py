"""The first write of whoever opened a file to write it anew needs no call; the store learns of it
before it decides anything that depends on it.
"""

from __future__ import annotations

import itertools
import operator
import os
import stat
import struct
import threading
import types
from collections.abc import Iterator

import pytest

from cxlfs.errors import MediaError, NotFoundError, OutOfMemoryError
from cxlfs.fuse import kernel
from cxlfs.fuse.direct import Direct
from cxlfs.fuse.kernel import Opcode
from cxlfs.native import FaultKind, set_fault
from cxlfs.native.transport import UPCALL_LEASE
from cxlfs.store.version import Version
from tests.fuse_api.test_data_plane import ROOT, Plane, made_plane
from tests.support.fuse_api import Context, finish
from tests.support.fuse_socket import REPLY, request
from tests.support.stores import new_store

_OPENED_AT = 128
"""In the answer to CREATE: behind the entry."""
NEW = os.O_WRONLY | os.O_CREAT


class Caller:
    """One thread's requests, one after the other."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.uid = 0
        self.told: list[int] = []
        """Inodes whose attributes the kernel was told to forget, before the last answer."""
        self._uniques = itertools.count(2, 2)

    def ask(self, opcode: int, inode: int, body: bytes) -> bytes:
        unique = next(self._uniques)
        self.plane.kernel.send(request(opcode, unique, body, inode=inode, uid=self.uid))
        self.told.clear()
        answered = 0
        while answered == 0:
            answer = self.plane.kernel.recv(1 << 20)
            _, error, answered = REPLY.unpack_from(answer)
            if answered == 0:
                told, offset, _ = struct.unpack_from("=Qqq", answer, REPLY.size)
                assert offset == -1, "pages wait for requests, and this is one"
                self.told.append(told)
        assert answered == unique
        if error:
            raise OSError(-error, os.strerror(-error))
        return answer[REPLY.size :]

    def create(self, name: bytes) -> tuple[int, int]:
        """Inode and handle."""
        body = kernel.CREATE.pack(NEW, 0o100644, 0, 0) + name + b"\0"
        answer = self.ask(Opcode.CREATE, ROOT, body)
        (inode,), (handle,) = (kernel.NUMBER.unpack_from(answer, at) for at in (0, _OPENED_AT))
        return inode, handle

    def saved(self, name: bytes, data: bytes) -> int:
        """The inode of a new file, written and closed."""
        inode, handle = self.create(name)
        assert self.write(inode, handle, 0, data)
        self.end(Opcode.FLUSH, inode, handle)
        self.end(Opcode.RELEASE, inode, handle)
        return inode

    def open(self, inode: int, flags: int) -> int:
        answer = self.ask(Opcode.OPEN, inode, kernel.OPEN.pack(flags, 0))
        return int(kernel.NUMBER.unpack_from(answer)[0])

    def write(self, inode: int, handle: int, offset: int, data: bytes) -> bool:
        """True: no call was needed."""
        upcalls = self.upcalls
        write = kernel.WRITE.pack(handle, offset, len(data), 0, os.O_WRONLY)
        self.ask(Opcode.WRITE, inode, write + data)
        return self.upcalls == upcalls

    def end(self, opcode: int, inode: int, handle: int) -> None:
        """FLUSH, FSYNC or RELEASE."""
        self.ask(opcode, inode, struct.pack("=Q16x", handle))

    @property
    def upcalls(self) -> int:
        return self.plane.workers.transport.statistics().upcalls

    def content(self, inode: int) -> bytes:
        """What is committed."""
        content = self.plane.store.namespace.get(inode).committed_content
        assert content is not None
        return content.read(0, 1 << 20, verify=True)

    def wrote(self, handle: int) -> bool:
        return self.plane.store.files.get(handle).wrote


@pytest.fixture
def caller() -> Iterator[Caller]:
    with made_plane() as plane:
        plane.start(Direct(plane.operations, plane.workers.transport))
        yield Caller(plane)


def test_saving_a_new_file_needs_no_call_for_its_write(caller: Caller) -> None:
    inode, handle = caller.create(b"new")
    before = caller.plane.store.get_attributes(inode).mtime_ns
    assert caller.write(inode, handle, 0, b"a" * 5000)
    assert caller.write(inode, handle, 5000, b"b" * 5000)
    caller.end(Opcode.FLUSH, inode, handle)
    assert caller.content(inode) == b"a" * 5000 + b"b" * 5000
    assert caller.plane.store.get_attributes(inode).mtime_ns > before
    assert caller.wrote(handle)
    assert not caller.write(inode, handle, 0, b"c"), "published: another version begins"
    caller.end(Opcode.RELEASE, inode, handle)
    assert caller.content(inode)[:2] == b"ca"


@pytest.mark.parametrize("end", [Opcode.FLUSH, Opcode.FSYNC])
def test_overwriting_from_nothing_needs_none_either(caller: Caller, end: int) -> None:
    inode = caller.saved(b"file", b"old")
    handle = caller.open(inode, os.O_WRONLY | os.O_TRUNC)
    assert caller.write(inode, handle, 0, b"new one")
    assert caller.content(inode) == b"old"
    caller.end(end, inode, handle)
    assert caller.content(inode) == b"new one"
    caller.end(Opcode.RELEASE, inode, handle)


def test_a_writer_killed_after_its_first_write_brings_the_old_content_back(caller: Caller) -> None:
    inode = caller.saved(b"file", b"old")
    handle = caller.open(inode, os.O_WRONLY | os.O_TRUNC)
    other = caller.open(inode, os.O_WRONLY)
    assert caller.write(inode, handle, 0, b"new one")
    with caller.plane.operations.lock:
        caller.plane.store.flush(handle, writer_killed=True)
    assert caller.wrote(handle)
    caller.end(Opcode.FLUSH, inode, other)
    assert caller.content(inode) == b"old", "who only opened the file publishes nothing"
    caller.end(Opcode.RELEASE, inode, handle)
    caller.end(Opcode.RELEASE, inode, other)
    with caller.plane.operations.lock:
        assert caller.plane.store.read(caller.plane.store.open_file(inode, 0), 0, 9) == b"old"


def test_a_new_file_left_by_a_killed_writer_is_incomplete(caller: Caller) -> None:
    inode, handle = caller.create(b"new")
    assert caller.write(inode, handle, 0, b"half")
    with caller.plane.operations.lock:
        caller.plane.store.flush(handle, writer_killed=True)
    caller.end(Opcode.RELEASE, inode, handle)
    (entry,) = caller.plane.store.list_checkpoints()
    assert entry.state == "incomplete"
    assert caller.content(inode) == b"half"


def test_who_opened_a_new_file_and_never_wrote_does_not_count_as_a_writer(caller: Caller) -> None:
    """A temporary file that is kept open while another handle is used by its name."""
    inode, keeper = caller.create(b"temporary")
    for text in (b"first", b"second"):
        handle = caller.open(inode, os.O_WRONLY | os.O_TRUNC)
        assert not caller.write(inode, handle, 0, text), "two handles: it must be told which"
        version = caller.plane.store.namespace.get(inode).version
        assert isinstance(version, Version)
        assert version.atomic is (text == b"second")
        caller.end(Opcode.FLUSH, inode, handle)
        caller.end(Opcode.RELEASE, inode, handle)
        assert not caller.wrote(keeper)
    caller.end(Opcode.FLUSH, inode, keeper)
    caller.end(Opcode.RELEASE, inode, keeper)
    assert caller.content(inode) == b"second"


def test_a_first_write_is_known_before_another_handle_overwrites(caller: Caller) -> None:
    inode, keeper = caller.create(b"file")
    assert caller.write(inode, keeper, 0, b"kept open")
    caller.end(Opcode.FSYNC, inode, keeper)
    assert caller.wrote(keeper)
    handle = caller.open(inode, os.O_WRONLY | os.O_TRUNC)
    version = caller.plane.store.namespace.get(inode).version
    assert isinstance(version, Version)
    assert version.atomic, "what was written before is committed"
    assert not caller.write(inode, keeper, 9, b"and on"), "two handles: it must be told which"
    assert not version.atomic, "two writers: nobody can say whose version is the whole one"
    for each in (handle, keeper):
        caller.end(Opcode.FLUSH, inode, each)
        caller.end(Opcode.RELEASE, inode, each)


def test_a_first_write_is_known_before_another_handle_writes(caller: Caller) -> None:
    inode, first = caller.create(b"file")
    second = caller.open(inode, os.O_WRONLY)
    assert caller.write(inode, first, 0, b"first")
    assert not caller.write(inode, second, 5, b"second")
    assert caller.wrote(first)
    assert not caller.write(inode, first, 0, b"F"), "it may be either from now on"
    for handle in (first, second):
        caller.end(Opcode.FLUSH, inode, handle)
        caller.end(Opcode.RELEASE, inode, handle)
    assert caller.content(inode) == b"Firstsecond"


def test_emptying_without_a_write_is_an_ordinary_change(caller: Caller) -> None:
    """As the shell does it for ``: > file``, and with a descriptor that is passed on."""
    inode = caller.saved(b"file", b"old")
    handle = caller.open(inode, os.O_WRONLY | os.O_TRUNC)
    caller.end(Opcode.FLUSH, inode, handle)
    assert caller.content(inode) == b""
    assert not caller.write(inode, handle, 0, b"line")
    with caller.plane.operations.lock:
        caller.plane.store.flush(handle, writer_killed=True)
    caller.end(Opcode.RELEASE, inode, handle)
    assert caller.content(inode) == b"line", "nothing to go back to"


def fill(caller: Caller, inode: int, handle: int) -> None:
    piece = bytes(64 << 10)
    for number in itertools.count():
        caller.write(inode, handle, number * len(piece), piece)


def test_a_first_write_into_a_full_store_fails_as_any_other(caller: Caller) -> None:
    opened = [caller.create(name) for name in (b"filler", b"small")]
    for inode, handle in opened:
        with pytest.raises(OSError, match="No space"):
            fill(caller, inode, handle)
    for inode, handle in opened:
        with pytest.raises(OSError, match="No space"):
            caller.end(Opcode.FLUSH, inode, handle)
        caller.end(Opcode.RELEASE, inode, handle)


def test_a_failed_fence_under_a_write_past_the_store_stops_writing(caller: Caller) -> None:
    """Only the worker that copied the data saw it fail: the upcall says so."""
    kept = caller.saved(b"kept", b"content")
    inode, handle = caller.create(b"new")
    other, beside = caller.create(b"beside")
    assert caller.write(other, beside, 0, b"x")
    set_fault(FaultKind.FENCE, 1)
    try:
        with pytest.raises(OSError, match="error"):
            caller.write(inode, handle, 0, bytes(5000))
    finally:
        set_fault(FaultKind.FENCE, 0)
    assert "a fence failed under a write" in (caller.plane.store.read_only_reason or "")
    for opened in ((inode, handle), (other, beside)):
        with pytest.raises(OSError, match="Read-only"):
            caller.write(*opened, 0, b"more")
        with pytest.raises(OSError, match=r"error|Read-only"):
            caller.end(Opcode.FLUSH, *opened)
        caller.end(Opcode.RELEASE, *opened)
    assert caller.content(kept) == b"content"
    caller.plane.operations.failures.counts.clear()


# --- privileges -----------------------------------------------------------------------------------

CAPABILITY = b"security.capability"


@pytest.mark.parametrize("privilege", ["capabilities", "set-user-ID"])
def test_who_wrote_before_takes_a_privilege_away_that_came_since(
    caller: Caller, privilege: str
) -> None:
    caller.uid = 1000
    requests, store = caller.plane.operations, caller.plane.store
    inode, handle = caller.create(b"program")
    assert caller.write(inode, handle, 0, b"first")
    if privilege == "capabilities":
        finish(requests.setxattr(inode, CAPABILITY, bytes(20), Context()))
    else:
        with requests.lock:
            store.set_attributes(inode, mode=0o4755)
            requests.privileges.changed(inode)
    assert not caller.write(inode, handle, 0, b"other")
    assert caller.told == [inode]
    assert not store.get_attributes(inode).mode & stat.S_ISUID
    assert CAPABILITY not in store.list_xattrs(inode)
    for end in (Opcode.FLUSH, Opcode.RELEASE):
        caller.end(end, inode, handle)


# --- what fails in the middle ---------------------------------------------------------------------

FAILURES = (MediaError("a fence failed", not_durable=True), OutOfMemoryError("none"), KeyError(5))
"""What the store does about it, another error, and a defect."""
PLACES = {
    "lookups": "operations.lookups.remember",
    "processes": "operations._processes.identify",
    "data plane": "workers.opened",
    "privileges": "operations.privileges._has_capabilities",
    "lease": "store.versions.leases.give_spare",
    "permission": "workers.allow_writes",
    "page cache": "operations.page_cache.keep_at_open",
}


def fail_at(caller: Caller, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception) -> None:
    def fail(*_arguments: object, **_keywords: object) -> None:
        raise error

    owner, _, name = PLACES[place].rpartition(".")
    monkeypatch.setattr(operator.attrgetter(owner)(caller.plane), name, fail)


def assert_nothing_is_open(caller: Caller) -> None:
    requests, store = caller.plane.operations, caller.plane.store
    assert len(requests.files) == 0
    assert store.files.open_count == 0
    assert not caller.plane.workers._ports
    for inode in store.namespace.inodes.values():
        assert inode.handles == 0
        assert inode.port is None
    requests.failures.counts.clear()


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_creation_that_fails_leaves_nothing(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    with monkeypatch.context() as failing:
        fail_at(caller, failing, place, error)
        with pytest.raises(OSError, match=r"error|memory"):
            caller.create(b"new")
    assert_nothing_is_open(caller)
    assert len(caller.plane.operations.lookups) == 0
    if not caller.plane.store.read_only:
        with pytest.raises(NotFoundError):
            caller.plane.store.lookup(ROOT, b"new")
        caller.saved(b"new", b"content")


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "lookups"])
def test_an_opening_that_fails_leaves_nothing_and_empties_nothing(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    caller.uid = 1000
    inode = caller.saved(b"file", b"content")
    with monkeypatch.context() as failing:
        fail_at(caller, failing, place, error)
        with pytest.raises(OSError, match=r"error|memory"):
            caller.open(inode, os.O_RDWR | os.O_TRUNC)
    assert_nothing_is_open(caller)
    assert caller.plane.operations.lookups[inode] == 1
    assert caller.content(inode) == b"content"
    if not caller.plane.store.read_only:
        handle = caller.open(inode, os.O_RDONLY)
        assert caller.ask(Opcode.READ, inode, kernel.READ.pack(handle, 0, 100)) == b"content"
        caller.end(Opcode.RELEASE, inode, handle)


def test_privileges_that_cannot_be_taken_away_leave_no_open_file(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = caller.saved(b"file", b"content")
    with caller.plane.operations.lock:
        caller.plane.store.set_attributes(inode, mode=0o4755)
    caller.uid = 1000

    def fail(**_values: object) -> None:
        raise MediaError("a fence failed", not_durable=True)

    with monkeypatch.context() as failing:
        failing.setattr(caller.plane.store.attributes.volume, "commit", fail)
        with pytest.raises(OSError, match="error"):
            caller.open(inode, os.O_WRONLY | os.O_TRUNC)
    assert_nothing_is_open(caller)


@pytest.mark.parametrize("uid", [0, 1000])
def test_emptying_without_write_access(caller: Caller, uid: int) -> None:
    """The kernel has checked that the opener may write."""
    inode = caller.saved(b"file", b"content")
    with caller.plane.operations.lock:
        caller.plane.store.set_attributes(inode, mode=0o4755)
    caller.uid = uid
    handle = caller.open(inode, os.O_RDONLY | os.O_TRUNC)
    assert caller.content(inode) == b"", "as truncate(2) does it"
    assert bool(caller.plane.store.get_attributes(inode).mode & stat.S_ISUID) == (uid == 0)
    assert caller.told == ([] if uid == 0 else [inode])
    caller.end(Opcode.RELEASE, inode, handle)
    assert caller.content(inode) == b""


def test_whoever_gives_room_ahead_maps_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that maps pages is one fewer for the writer; the lock is given up before."""
    store = new_store()
    requests = types.SimpleNamespace(
        lock=threading.Lock(),
        store=store,
        failures=None,
        direct_access=None,
        past=None,
        page_cache=types.SimpleNamespace(is_direct=None),
    )
    rooms: list[tuple[int, int] | None] = [(4096, 8192), None, (4096, 8192)]
    told: list[bool] = []

    def lease_ahead(ino: int) -> tuple[int, int] | None:
        assert ino == 7
        assert requests.lock.locked()
        return rooms.pop(0)

    def populate(*_arguments: object) -> int:
        raise AssertionError

    monkeypatch.setattr(store.files, "lease_ahead", lease_ahead)
    monkeypatch.setattr(type(store.media), "populate", populate)
    served = Direct(
        requests,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        on_lease=lambda: told.append(requests.lock.locked()),
    )
    upcall = types.SimpleNamespace(opcode=UPCALL_LEASE, inode=7)
    for is_left, count in ((True, 1), (True, 1), (False, 1)):
        monkeypatch.setattr(type(store.volume.space), "has_room_ahead", is_left)
        assert served.serve(upcall) is None  # type: ignore[arg-type]
        assert told == [False] * count
    assert not rooms
    store.close()
