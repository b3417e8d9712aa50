"""Try a hostile checkpoint: look at it in every way there is, and watch what the code does.

Never here: making them (``fuzz_checkpoints``). Nothing may raise, write, start a program, connect,
or load code; what is found must be printable, bounded, and inside the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from cxlfs.checkpoint import Checkpoint, Level, State, catalogue, hdf5_apart, inspect, plan
from cxlfs.checkpoint.ages import birth_ns
from cxlfs.errors import NoCheckpointError, NoGoodCheckpointError
from tests.support.fuzz_checkpoints import Base

WORDS_MAX = 10_000
_FORBIDDEN = frozenset(
    {
        "ctypes.dlopen",
        "exec",
        "marshal.loads",
        "os.exec",
        "os.fork",
        "os.mkdir",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
        "os.system",
        "os.truncate",
        "pickle.find_class",
        "shutil.rmtree",
        "socket.connect",
        "subprocess.Popen",
    }
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclasses.dataclass
class Outcome:
    """What was found, for the statistics."""

    kind: str
    state: str


class _Watch:
    """Audit events of this process while ``on``; a hook can never be taken away again."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.on:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            self.seen.append(f"open for writing {arguments}")
        elif event == "import" and not _is_harmless(str(arguments[0])):
            self.seen.append(f"import {arguments[0]}")


def _is_harmless(module: str) -> bool:
    """What Python itself loads when it is needed the first time."""
    return module.split(".", maxsplit=1)[0] in {"encodings", "_strptime", "unicodedata", "cxlfs"}


_watch: _Watch | None = None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """AssertionError when something happened that readers never do.

    Without HDF5's library, which is a program of its own (``hdf5_apart``, fuzzed by its own test).
    """
    global _watch  # noqa: PLW0603  one hook for a process
    files_max, hdf5_apart.FILES_MAX = hdf5_apart.FILES_MAX, 0
    if _watch is None:
        birth_ns(Path("/"))  # loads the C library's own symbols once
        _watch = _Watch()
    _watch.seen.clear()
    _watch.on = True
    try:
        yield
    finally:
        _watch.on = False
        hdf5_apart.FILES_MAX = files_max
    if _watch.seen:
        raise AssertionError(" and ".join(_watch.seen))


def write(base: Base, directory: Path) -> Path:
    """Lay the files down; the path of the checkpoint."""
    for name, data in base.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory / base.path


def exercise(base: Base, directory: Path) -> Outcome:
    """``directory`` is empty before and after. Raises whatever is wrong."""
    path = write(base, directory)
    try:
        with watched():
            found = inspect(path)
            everything = inspect(path, Level.CONTENT)
            entries = catalogue(directory)
            with contextlib.suppress(NoCheckpointError, NoGoodCheckpointError):
                plan(directory, Level.STRUCTURE)
        for each in (found, everything, *(entry.checkpoint for entry in entries)):
            if each is not None:
                check(each)
        if found is not None and everything is not None:
            check_levels(found, everything)
    finally:
        for each in directory.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    if everything is None:
        return Outcome("none", "none")
    return Outcome(everything.kind, everything.state.value)


def check(found: Checkpoint) -> None:
    """What is said is bounded and printable, and what is called complete is inside its files."""
    assert isinstance(found.state, State)
    assert (found.reason is None) is (found.state is State.COMPLETE)
    assert len(found.words) < WORDS_MAX
    assert found.step is None or 0 <= found.step < 1 << 63
    sizes = {file.name: file.size_bytes for file in found.files}
    for file in found.files:
        assert file.size_bytes is None or file.size_bytes >= 0
        assert found.state is not State.COMPLETE or file.size_bytes is not None
    for tensor in found.tensors:
        assert (tensor.offset is None) is (tensor.size_bytes is None)
        assert all(dimension >= 0 for dimension in tensor.shape)
        if found.state is State.COMPLETE and tensor.offset is not None:
            size = sizes[tensor.file]
            assert size is not None
            assert 0 <= tensor.offset <= tensor.offset + (tensor.size_bytes or 0) <= size


def check_levels(found: Checkpoint, everything: Checkpoint) -> None:
    """Reading more never makes a checkpoint better."""
    if everything.state is State.COMPLETE:
        assert found.state is State.COMPLETE
        assert everything.content_verified
    assert found.kind == everything.kind
