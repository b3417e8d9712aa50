"""Operations over files whose version before is held until somebody has judged the new one.

What the judge says, and how the writer ends, is told by each operation: neither is asked of the
store. ``tape`` compares what is held, too.
"""

from __future__ import annotations

from cxlfs.errors import NotFoundError
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import REST_SECONDS, TornMode
from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.operations import BIG, TRUNCATE, commit_periodically

_OLD, _OTHER = b"old", b"other"


def holding(bench: Bench, ending: Ending = Ending.ALIVE) -> None:
    """From here on overwrites are held, and their writers have ended like that."""
    overwrites = bench.store.overwrites
    overwrites.mode = TornMode.BACK
    overwrites.writer = lambda: "a writer"
    overwrites.ending_of = lambda _writer: ending


def judge(bench: Bench, evidence: Evidence) -> None:
    """Answer every question like that, and decide."""
    overwrites = bench.store.overwrites
    now = overwrites.clock() + 2 * REST_SECONDS
    overwrites.clock = lambda: now
    while (question := overwrites.next_question()) is not None:
        question.read("new", 0, 100)
        question.read("old", 0, 100)
        overwrites.judged(question, evidence, "it is cut")
    before = set(bench.store.versions.asides)
    bench.do("decide", overwrites.settle, late=True, steps=True)
    for ino in before:
        bench.contents.pop(ino, None)  # what was there before, perhaps


def _content(bench: Bench, path: bytes) -> bytes:
    try:
        inode = bench.inode(path)
    except NotFoundError:
        return b""
    return b"" if inode.live is None else bytes(inode.live.read(0, inode.live.size))


def held_left(bench: Bench) -> None:
    """Nobody has looked at the new content yet."""
    holding(bench)
    bench.save(_OLD, 5000)


def held_released(bench: Bench) -> None:
    holding(bench)
    bench.save(_OLD, 3000)
    judge(bench, Evidence.NONE)


def held_goes_back(bench: Bench) -> None:
    holding(bench, Ending.KILLED)
    bench.save(_OLD, 700)
    judge(bench, Evidence.STRONG)


def held_goes_back_to_much(bench: Bench) -> None:
    """And what was torn makes room for something else."""
    bench.save(_OLD, BIG)
    held_goes_back(bench)
    bench.save(b"new", BIG)


def held_reported(bench: Bench) -> None:
    holding(bench, Ending.WELL)
    bench.save(_OLD, 2000)
    judge(bench, Evidence.WEAK)


def held_saved_again(bench: Bench) -> None:
    """Over one that nobody has judged, and over one that is known to be torn: the newest that is
    not comes back.
    """
    holding(bench)
    bench.save(_OLD, 4000)
    good = _content(bench, _OLD)
    bench.save(_OLD, 900)
    judge(bench, Evidence.STRONG)
    bench.save(_OLD, 1200)
    holding(bench, Ending.BADLY)
    judge(bench, Evidence.STRONG)
    if not bench.left_open:  # else an earlier operation still writes
        assert _content(bench, _OLD) == good


def held_fsync(bench: Bench) -> None:
    holding(bench, Ending.INTERRUPTED)
    handle = bench.open(_OLD, TRUNCATE)
    bench.write(handle, 0, 3000)
    bench.fsync(handle)
    bench.write(handle, 1500, 3000)
    bench.close(handle)
    judge(bench, Evidence.STRONG)


def held_staged(bench: Bench) -> None:
    """The save lasts longer than the commit interval."""
    good = _content(bench, _OLD)
    holding(bench, Ending.INTERRUPTED)
    handle = bench.open(_OLD, TRUNCATE)
    bench.write(handle, 0, 3000)
    commit_periodically(bench)
    bench.write(handle, 2500, 3000)
    bench.close(handle)
    judge(bench, Evidence.STRONG)
    if good and not bench.left_open:
        assert _content(bench, _OLD) == good


def held_changed_in_place(bench: Bench) -> None:
    held_left(bench)
    handle = bench.open(_OLD)
    bench.write(handle, 100, 300)
    bench.close(handle)
    changed = _content(bench, _OLD)
    holding(bench, Ending.KILLED)
    judge(bench, Evidence.STRONG)
    if not bench.left_open:
        assert _content(bench, _OLD) == changed


def held_killed_in_the_next(bench: Bench) -> None:
    held_left(bench)
    handle = bench.open(_OLD, TRUNCATE)
    bench.write(handle, 0, 2500)
    bench.close(handle, killed=True)
    holding(bench, Ending.KILLED)
    judge(bench, Evidence.STRONG)


def held_renamed_and_removed(bench: Bench) -> None:
    held_left(bench)
    bench.rename(_OLD, b"new")
    bench.save(_OTHER, 300)
    bench.rename(_OTHER, b"new")


def held_given_up(bench: Bench) -> None:
    held_left(bench)
    bench.do("give up", bench.store.overwrites.give_up_oldest, late=True)
    bench.save(b"new", 6000)


def held_restored_twice(bench: Bench) -> None:
    held_goes_back(bench)
    for _ in range(2):
        bench.xattr(_OLD, b"user.cxlfs.restore", b"")
        bench.contents.clear()


def held_by_two_names(bench: Bench) -> None:
    holding(bench, Ending.KILLED)
    bench.save(_OTHER, 100)
    bench.link(_OTHER, b"third")
    judge(bench, Evidence.STRONG)


def held_new_name(bench: Bench) -> None:
    """A new file of a series is torn, and loses its name."""
    holding(bench, Ending.KILLED)
    bench.save(b"step-1", 600)
    bench.save(b"step-2", 900)
    judge(bench, Evidence.STRONG)


def held_new_name_stays(bench: Bench) -> None:
    """It is whole, and what is said of it on the media ends."""
    holding(bench, Ending.KILLED)
    bench.save(b"step-1", 600)
    bench.save(b"step-2", 900)
    judge(bench, Evidence.NONE)
    bench.save(b"step-3", 300)
    judge(bench, Evidence.STRONG)


HELD_OPERATIONS = [
    held_left, held_released, held_goes_back, held_goes_back_to_much, held_reported,
    held_saved_again, held_fsync, held_staged, held_changed_in_place, held_killed_in_the_next,
    held_renamed_and_removed, held_given_up, held_restored_twice, held_by_two_names,
    held_new_name, held_new_name_stays,
]  # fmt: skip
