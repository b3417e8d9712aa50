"""What users run: programs that save checkpoints, that log, and that meddle.

A program is a generator over a world: each step is one verb, or a few that nothing parts. It ends
by itself, or raises Refused when what it relied on is gone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

from tests.support.user_histories.model import Directory, Process, frame
from tests.support.user_histories.world import Handle, Refused, World

Program = Iterator[None]
RUN = b"run"
_SIZES = (1, 40, 300, 900, 5000)


class Writer:
    """A process with a source of contents, no two of them the same."""

    def __init__(self, world: World, process: Process, rng: random.Random) -> None:
        self.world, self.process, self.rng = world, process, rng
        self._count = 0

    def content(self) -> bytes:
        self._count += 1
        word = b"%s %d " % (self.process.name.encode(), self._count)
        size = self.rng.choice(_SIZES)
        return frame((word * (size // len(word) + 1))[: max(size, len(word))])

    def exists(self, path: bytes) -> bool:
        return self.world.find(path) is not None

    # --- one file -------------------------------------------------------------------------------

    def save(self, path: bytes, data: bytes | None = None, *, how: str = "plain") -> Program:
        """``how``: plain (O_TRUNC, or a new file), renamed (from a temporary name), anew (it is
        unlinked first), in place.
        """
        data = self.content() if data is None else data
        target = path + b".tmp" if how == "renamed" else path
        if how == "anew" and self.exists(path):
            self.world.unlink(self.process, path)
            yield
        cut = self.rng.randrange(1, len(data)) if len(data) > 1 else len(data)
        handle = self._opened(target, data[:cut], how)
        yield
        if path.endswith(b"/model.pt") and self.rng.random() < 0.2:
            self.world.fsync(handle)
            yield
        if cut < len(data):
            self.world.write(handle, data[cut:])
            yield
        if self.rng.random() < 0.2:
            self.world.fsync(handle)
            yield
        self.world.close(handle)
        yield
        if how == "renamed":
            self.world.rename(self.process, target, path)
            yield

    def _opened(self, path: bytes, first: bytes, how: str) -> Handle:
        if not self.exists(path):
            return self.world.create(self.process, path, first)
        return self.world.open(self.process, path, first, empties=how != "in place")

    def whole(self, path: bytes) -> None:
        """Save a file in one step."""
        for _ in self.save(path):
            pass

    def make(self, path: bytes) -> None:
        if not self.exists(path):
            self.world.make_directory(self.process, path)

    def remove_tree(self, path: bytes) -> Program:
        directory = self.world.directory(path)
        for name, child in list(directory.entries.items()):
            if isinstance(child, Directory):
                yield from self.remove_tree(path + b"/" + name)
            else:
                self.world.unlink(self.process, path + b"/" + name)
                yield
        self.world.remove_directory(self.process, path)
        yield


# --- savers -------------------------------------------------------------------------------------


def save_transformers(writer: Writer, top: bytes, number: int, how: str) -> Program:
    path = top + b"/checkpoint-%d" % number
    writer.make(path)
    yield
    if writer.rng.random() < 0.3:
        writer.make(path + b"/optimizer")
        yield
        yield from writer.save(path + b"/optimizer/rank-0", how=how)
    for name in (b"model.safetensors", b"optimizer.pt", b"trainer_state.json"):
        yield from writer.save(path + b"/" + name, how=how)


def save_dcp(writer: Writer, top: bytes, number: int, how: str) -> Program:
    path = top + b"/dcp-%d" % number
    writer.make(path)
    yield
    for name in (b"__0_0.distcp", b"__1_0.distcp"):
        yield from writer.save(path + b"/" + name, how=how)
    yield from writer.save(path + b"/.metadata", how="renamed")


def save_safetensors(writer: Writer, top: bytes, number: int, how: str) -> Program:
    path = top + b"/model-%d" % number
    writer.make(path)
    yield
    shards = [b"model-%05d-of-00002.safetensors" % part for part in (1, 2)]
    for name in (b"config.json", *shards, b"model.safetensors.index.json"):
        yield from writer.save(path + b"/" + name, how=how)


def save_deepspeed(writer: Writer, top: bytes, number: int, how: str) -> Program:
    path = top + b"/global_step%d" % number
    writer.make(path)
    yield
    for name in (b"mp_rank_00_model_states.pt", b"zero_pp_rank_0_optim_states.pt"):
        yield from writer.save(path + b"/" + name, how=how)
    renamed = how if how != "in place" else "renamed"
    yield from writer.save(top + b"/latest", frame(path), how=renamed)


def save_accelerate(writer: Writer, top: bytes, number: int, how: str) -> Program:
    path = top + b"/checkpoint_%d" % number
    writer.make(path)
    yield
    for name in (b"model.safetensors", b"optimizer.bin", b"random_states_0.pkl"):
        yield from writer.save(path + b"/" + name, how=how)


def save_zarr(writer: Writer, top: bytes, number: int, how: str) -> Program:
    path = top + b"/a%d.zarr" % number
    writer.make(path)
    yield
    yield from writer.save(path + b"/zarr.json", how=how)
    writer.make(path + b"/c")
    yield
    for name in (b"c/0", b"c/1"):
        yield from writer.save(path + b"/" + name, how=how)
    # It is written over. To remove what was saved begins the next save.
    yield from writer.save(path + b"/zarr.json", how="plain" if how == "anew" else how)


def save_orbax(writer: Writer, top: bytes, number: int, how: str) -> Program:
    path = top + b"/%d.orbax-checkpoint-tmp-%d" % (number, number)
    writer.make(path)
    yield
    writer.make(path + b"/params")
    yield
    for name in (b"params/a", b"params/b", b"_METADATA"):
        yield from writer.save(path + b"/" + name, how=how)
    final = top + b"/step-%d" % number
    if writer.exists(final):
        yield from writer.remove_tree(final)
    writer.world.rename(writer.process, path, final)
    yield


def save_lone(writer: Writer, top: bytes, number: int, how: str) -> Program:
    del number
    yield from writer.save(top + b"/model.pt", how=how)


SAVERS: dict[str, Callable[[Writer, bytes, int, str], Program]] = {
    "transformers": save_transformers,
    "dcp": save_dcp,
    "safetensors": save_safetensors,
    "deepspeed": save_deepspeed,
    "accelerate": save_accelerate,
    "zarr": save_zarr,
    "orbax": save_orbax,
    "lone": save_lone,
}
NAMES = {
    "transformers": b"checkpoint-%d",
    "dcp": b"dcp-%d",
    "safetensors": b"model-%d",
    "deepspeed": b"global_step%d",
    "accelerate": b"checkpoint_%d",
    "zarr": b"a%d.zarr",
}


def saver(layout: str, top: bytes) -> Callable[[Writer], Program]:
    """Save again and again: beside, over, or instead of what is there."""

    def run(writer: Writer) -> Program:
        rng = writer.rng
        writer.make(top)
        yield
        number = 1
        for _ in range(rng.randrange(1, 4)):
            how = rng.choice(["plain", "plain", "renamed", "anew", "in place"])
            path = top + b"/" + NAMES[layout] % number if layout in NAMES else b""
            if rng.random() < 0.25 and path and writer.exists(path):
                yield from writer.remove_tree(path)
            yield from SAVERS[layout](writer, top, number, how)
            number += rng.random() < 0.6
            if number > 2 and path and rng.random() < 0.3 and writer.exists(path):
                yield from writer.remove_tree(path)

    return run


# --- others -------------------------------------------------------------------------------------


def logger(top: bytes) -> Callable[[Writer], Program]:
    """Keep a log open, beside or in a directory of checkpoints."""

    def run(writer: Writer) -> Program:
        world, rng = writer.world, writer.rng
        writer.make(top)
        yield
        path = rng.choice([top, *_directories(world, top)]) + rng.choice([b"/train.log", b"/out"])
        if writer.exists(path):
            handle = world.open(writer.process, path, b"again\n", empties=False, appends=True)
        else:
            handle = world.create(writer.process, path, b"begin\n", appends=True)
        yield
        for number in range(rng.randrange(1, 9)):
            world.write(handle, b"line %d\n" % number)
            yield
            if rng.random() < 0.2:
                world.fsync(handle)
                yield
        world.close(handle)

    return run


def meddler(top: bytes) -> Callable[[Writer], Program]:
    """Do anything to one's own files in and beside the directories of others; and to theirs."""

    def run(writer: Writer) -> Program:
        writer.make(top)
        yield
        for _ in range(writer.rng.randrange(3, 12)):
            with contextlib.suppress(Refused):
                writer.rng.choice(DEEDS)(writer, top)
            yield

    return run


def _directories(world: World, top: bytes) -> list[bytes]:
    """Every directory below."""
    found, pending = [], [top]
    while pending:
        path = pending.pop()
        for name, child in world.directory(path).entries.items():
            if isinstance(child, Directory):
                pending.append(path + b"/" + name)
                found.append(pending[-1])
    return found


def _files(world: World, top: bytes, uid: int | None = None) -> list[bytes]:
    return [
        top + b"/" + b"/".join(path)
        for path, file in world.directory(top).below()
        if uid in {None, file.uid}
    ]


def _own(writer: Writer, top: bytes) -> bytes:
    found = [path for path in _files(writer.world, top, writer.process.uid) if b"/m-" in path]
    if not found:
        raise Refused(top)
    return writer.rng.choice(found)


def _place(writer: Writer, top: bytes) -> bytes:
    above = writer.rng.choice([top, *_directories(writer.world, top)])
    return above + b"/m-%d" % writer.rng.randrange(4)


def make_own(writer: Writer, top: bytes) -> None:
    writer.whole(_place(writer, top))


def overwrite_own(writer: Writer, top: bytes) -> None:
    writer.whole(_own(writer, top))


def rename_own(writer: Writer, top: bytes) -> None:
    writer.world.rename(writer.process, _own(writer, top), _place(writer, top))


def link_own(writer: Writer, top: bytes) -> None:
    writer.world.link(writer.process, _own(writer, top), _place(writer, top))


def unlink_own(writer: Writer, top: bytes) -> None:
    writer.world.unlink(writer.process, _own(writer, top))


def mode_of_own(writer: Writer, top: bytes) -> None:
    writer.world.set_mode(writer.process, _own(writer, top), writer.rng.choice([0o600, 0o644]))


def make_tree(writer: Writer, top: bytes) -> None:
    path = _place(writer, top)
    writer.world.make_directory(writer.process, path)
    writer.whole(path + b"/m-file")


def move_tree(writer: Writer, top: bytes) -> None:
    found = [p for p in _directories(writer.world, top) if p.rpartition(b"/")[2][:2] == b"m-"]
    if not found:
        raise Refused(top)
    writer.world.rename(writer.process, writer.rng.choice(found), _place(writer, top))


def link_of_others(writer: Writer, top: bytes) -> None:
    found = _files(writer.world, top) or [b""]
    writer.world.link(writer.process, writer.rng.choice(found), _place(writer, top))


def of_others(writer: Writer, top: bytes) -> bytes:
    found = [p for p in _files(writer.world, top) if b"/m-" not in p]
    if not found:
        raise Refused(top)
    return writer.rng.choice(found)


def overwrite_of_others(writer: Writer, top: bytes) -> None:
    writer.whole(of_others(writer, top))


def unlink_of_others(writer: Writer, top: bytes) -> None:
    writer.world.unlink(writer.process, of_others(writer, top))


def move_of_others(writer: Writer, top: bytes) -> None:
    path = of_others(writer, top)
    writer.world.rename(writer.process, path, top + b"/m-taken-%d" % writer.rng.randrange(9))


DEEDS: list[Callable[[Writer, bytes], None]] = [
    *(make_own, make_own, overwrite_own, rename_own, rename_own, link_own, unlink_own, mode_of_own),
    *(make_tree, move_tree, link_of_others),
    *(overwrite_of_others, unlink_of_others, move_of_others),
]
