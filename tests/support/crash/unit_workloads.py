"""Workloads over checkpoint units (``unit_scene``)."""

from __future__ import annotations

import os
from collections.abc import Callable

from cxlfs.store.space import State as SpaceState
from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.unit_ending_workloads import ENDING_WORKLOADS
from tests.support.crash.unit_file_workloads import FILE_WORKLOADS, unit_of_files
from tests.support.crash.unit_member_workloads import MEMBER_WORKLOADS
from tests.support.crash.unit_removal_workloads import LONG_REMOVAL_WORKLOADS, REMOVAL_WORKLOADS
from tests.support.crash.unit_scene import MARKER, SET, Scene, complete_set, short_steps

# --- workloads --------------------------------------------------------------------------------


def unit_of_a_new_directory(bench: Bench) -> None:
    scene = Scene(bench)
    scene.start()
    scene.begin(b"checkpoint-2")
    scene.make(b"checkpoint-2")
    scene.save(b"checkpoint-2/a", 6000)
    scene.make(b"checkpoint-2/below")
    scene.save(b"checkpoint-2/below/b", 300)
    scene.finish(b"checkpoint-2/" + MARKER, 90, b"checkpoint-2")


def unit_overwritten(bench: Bench) -> None:
    """Each file anew, one more, one less, then the marker; then what was kept goes away."""
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/a", 6500)
    bench.unlink(SET + b"/b")
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)
    scene.save(SET + b"/below/c", 300)
    scene.save(SET + b"/d", 300)
    scene.finish(SET + b"/" + MARKER, 90, SET)
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)
    scene.save(b"unrelated", 9000)


def unit_kept_in_steps(bench: Bench) -> None:
    """Each content takes several records to keep. Between two of them there is a new image, and
    what was kept before is removed.
    """
    scene = complete_set(bench)
    scene.begin(SET)
    with short_steps():
        assert scene.step(SET + b"/a")
        bench.do("rollover", bench.store.volume.rollover, late=True)
        bench.do("make room", scene.units.garbage.remove_some, late=True, keeps=True)
        assert not scene.step(SET + b"/a")
        scene.save(SET + b"/a", 300)
        bench.unlink(SET + b"/b")
        handle = scene.open(SET + b"/below/c", os.O_RDWR)
        scene.write_in_place(handle, 500)
        scene.close(handle)
    scene.finish(SET + b"/" + MARKER, 95, SET)


def unit_renamed_within(bench: Bench) -> None:
    """A saver rotates its files and a directory, links and exchanges some; then it is killed."""
    scene = complete_set(bench)
    scene.units.writer = lambda: "saver"
    endings = {"saver": Ending.ALIVE}
    scene.units.ending_of = endings.__getitem__  # type: ignore[assignment]
    store = bench.store
    scene.begin(SET)
    directory = bench.inode(SET).ino

    def verb(name: str, action: Callable[[], object]) -> None:
        bench.do(name, action, commits=True)

    verb("rename", lambda: store.rename(directory, b"b", directory, b"b-old"))
    verb("exchange", lambda: store.rename(directory, b"a", directory, b"b-old", exchange=True))
    verb("directory", lambda: store.rename(directory, b"below", directory, b"before"))
    scene.save(SET + b"/b", 400)
    scene.save(SET + b"/before/c", 300)
    bench.do("link", lambda: store.link(bench.inode(SET + b"/a").ino, directory, b"l"), late=True)
    bench.unlink(SET + b"/before/c")
    bench.do("rmdir", lambda: store.remove_directory(directory, b"before"))
    endings["saver"] = Ending.KILLED
    scene.back(SET)
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)


def unit_changed_in_place(bench: Bench) -> None:
    """Without truncation, with fsync, as HDF5 does."""
    scene = complete_set(bench)
    scene.begin(SET)
    for name in (b"/a", b"/b"):
        handle = scene.open(SET + name, os.O_RDWR)
        scene.write_in_place(handle, 500)
        bench.fsync(handle)
        bench.close(handle)
    scene.finish(SET + b"/" + MARKER, 90, SET)


def unit_marker_first(bench: Bench) -> None:
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/" + MARKER, 95)
    scene.save(SET + b"/a", 300)
    scene.finish(SET + b"/" + MARKER, 99, SET)


def unit_marker_before_a_file_is_closed(bench: Bench) -> None:
    """It is done when that file is."""
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/below/c", 300)
    handle = scene.open(SET + b"/a")
    bench.write(handle, 0, 6100)
    scene.save(SET + b"/" + MARKER, 95)
    assert scene.units.open_units()
    scene.ending("last close", SET, lambda: bench.store.flush(handle, writer_killed=False))
    bench.do("release", lambda: bench.store.release(handle), late=True, keeps=True)


def unit_marker_twice(bench: Bench) -> None:
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/a", 300)
    scene.finish(SET + b"/" + MARKER, 95, SET)
    scene.begin(SET)
    scene.save(SET + b"/a", 400)
    scene.save(SET + b"/rng_state_1.pth", 400)
    scene.finish(SET + b"/" + MARKER, 99, SET)


def unit_marker_renamed(bench: Bench) -> None:
    """Shards that show what the directory is, and metadata renamed into place."""
    scene = Scene(bench)
    scene.make(b"step-2")
    scene.start()
    store = bench.store
    directory = bench.inode(b"step-2").ino
    made: list[int] = []

    def create() -> None:
        made.append(store.create(directory, b"__0_0.distcp", 0o644, 1, 1, os.O_RDWR)[1])
        scene.begin_without(b"step-2")

    bench.do("create", create, late=True)
    bench.contents[store.files.get(made[0]).inode.ino] = bytearray()
    bench.write(made[0], 0, 6000)
    bench.close(made[0])
    scene.save(b"step-2/.metadata.tmp", 100)
    scene.ending(
        "rename",
        b"step-2",
        lambda: store.rename(directory, b".metadata.tmp", directory, b".metadata"),
    )
    scene.begin(b"step-2")
    scene.save(b"step-2/__0_0.distcp", 500)
    bench.unlink(b"step-2/.metadata")


def unit_marker_beside(bench: Bench) -> None:
    """What the marker names is there whenever the marker is."""
    scene = Scene(bench)
    scene.start()
    for number, how in ((5, "written"), (6, "renamed")):
        name = b"global_step%d" % number
        scene.begin(name)
        scene.make(name)
        scene.save(name + b"/zero", 6000)
        scene.save(b"latest.tmp", 100 + number)
        handle = scene.open(b"latest")
        bench.write(handle, 0, number)
        assert len(scene.units.open_units()) == 1
        scene.end(name)
        after = scene.bench.tape.committed()
        scene.begin_without(name)

        def publish(handle: int = handle, how: str = how, name: bytes = name) -> None:
            if how == "written":
                bench.store.flush(handle, writer_killed=False)
            else:
                bench.store.rename(1, b"latest.tmp", 1, b"latest")
            assert not scene.units.open_units()
            scene.end(name)

        number_of_verb = len(bench.tape.names)
        bench.do("publish", publish, commits=True)
        bench.tape.between[number_of_verb].append(after)
        bench.do("release", lambda handle=handle: bench.store.release(handle), late=True)


def unit_renamed(bench: Bench) -> None:
    """A temporary directory gets its name: that is the end, in one record."""
    scene = Scene(bench)
    scene.start()
    temporary = b"7.orbax-checkpoint-tmp-1"
    scene.begin(temporary)
    scene.make(temporary)
    scene.save(temporary + b"/a", 6000)
    scene.ending("rename", temporary, lambda: bench.store.rename(1, temporary, 1, b"7"))


def unit_under_a_moved_directory(bench: Bench) -> None:
    """The directory above gets another name while the unit is open."""
    scene = Scene(bench)
    scene.start()
    scene.begin(b"dir/checkpoint-3")
    scene.make(b"dir/checkpoint-3")
    scene.save(b"dir/checkpoint-3/a", 3000)

    def rename() -> None:
        bench.store.rename(1, b"dir", 1, b"moved")
        scene.end(b"dir/checkpoint-3")
        scene.begin_without(b"moved/checkpoint-3")

    bench.do("rename", rename, commits=True)
    scene.save(b"moved/checkpoint-3/b", 3000)
    scene.ending(
        "marker",
        b"moved/checkpoint-3",
        lambda: _save_directly(bench, b"moved/checkpoint-3/" + MARKER),
    )


def _save_directly(bench: Bench, path: bytes) -> None:
    store = bench.store
    directory, name = bench.place(path)
    handle = store.create(directory, name, 0o644, 1, 1, os.O_RDWR)[1]
    store.write(handle, 0, b"m" * 50)
    store.flush(handle, writer_killed=False)
    store.release(handle)


def units_in_each_other(bench: Bench) -> None:
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/a", 200)
    scene.make(SET + b"/global_step9")
    scene.save(SET + b"/global_step9/zero", 5000)
    scene.save(SET + b"/latest", 12)
    scene.finish(SET + b"/" + MARKER, 90, SET)
    scene.begin(SET)
    scene.save(SET + b"/global_step9/zero", 100)


def units_side_by_side(bench: Bench) -> None:
    """Two are open at once, and end one after the other."""
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/a", 200)
    scene.begin(b"checkpoint-2")
    scene.make(b"checkpoint-2")
    scene.save(b"checkpoint-2/a", 3000)
    scene.finish(SET + b"/" + MARKER, 90, SET)
    scene.save(b"checkpoint-2/b", 300)
    scene.finish(b"checkpoint-2/" + MARKER, 90, b"checkpoint-2")


def unit_back_with_several_writers(bench: Bench) -> None:
    """Two are killed, in a file and between two; what was there before comes back at once."""
    scene = complete_set(bench)
    endings: dict[object, Ending] = {}
    present = ["rank 0"]
    scene.units.writer = lambda: present[0]
    scene.units.ending_of = lambda who: endings.get(who, Ending.ALIVE)
    scene.begin(SET)
    scene.save(SET + b"/a", 400)
    present[0] = "rank 1"
    handle = scene.open(SET + b"/below/c")
    bench.write(handle, 0, 3000)
    endings |= {"rank 0": Ending.KILLED, "rank 1": Ending.KILLED}
    bench.do(
        "killed",
        lambda: bench.store.flush(handle, writer_killed=True),
        late=True,
        keeps=True,
    )
    bench.do("release", lambda: bench.store.release(handle), late=True, keeps=True)
    scene.back(SET)
    scene.save(b"unrelated", 3000)


def unit_back_twice(bench: Bench) -> None:
    """What has come back is overwritten and goes back again."""
    scene = complete_set(bench)
    scene.units.writer = lambda: "rank 0"
    for _ in range(2):
        endings = {"rank 0": Ending.ALIVE}
        scene.units.ending_of = endings.__getitem__  # type: ignore[assignment]
        scene.begin(SET)
        scene.save(SET + b"/a", 300)
        endings["rank 0"] = Ending.KILLED
        scene.back(SET)


def unit_that_no_marker_ends(bench: Bench) -> None:
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/a", 300)
    scene.now += 1000.0
    scene.ending("quiet", SET, scene.units.maintain)


def unit_on_a_full_store(bench: Bench) -> None:
    """There is no room for the second file: what the first one was comes back."""
    scene = complete_set(bench)
    space = bench.store.volume.space
    while space.free_count > bench.store.volume.refresh_reserve():
        space.take(SpaceState.IMAGE)
    scene.begin(SET)
    scene.save(SET + b"/a", 300)
    handle = scene.open(SET + b"/below/c")
    step = 0
    while bench.write(handle, 16_000 * step, 16_000):
        step += 1
    assert step < 100

    def fails() -> None:
        bench.store.flush(handle, writer_killed=False)

    assert not bench.do("close", fails, late=True, keeps=True), "a failed write was published"
    bench.do("release", lambda: bench.store.release(handle), late=True, keeps=True)
    scene.now += 1000.0
    scene.back(SET)


def unit_at_the_close_of_the_store(bench: Bench) -> None:
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/a", 300)
    handle = scene.open(SET + b"/below/c")
    bench.write(handle, 0, 3000)

    def close() -> None:
        scene.units.finish()
        scene.end(SET)
        bench.store.settle_all()
        bench.store.volume.close_cleanly()

    bench.do("close", close, commits=True)


LONG_WORKLOADS = [*FILE_WORKLOADS, *LONG_REMOVAL_WORKLOADS]
"""On lines 5 to 8 s each, on pages one."""
UNIT_WORKLOADS = [
    unit_of_a_new_directory, unit_overwritten, unit_kept_in_steps, unit_changed_in_place,
    unit_renamed_within, unit_marker_first,
    unit_marker_before_a_file_is_closed, unit_marker_twice, unit_marker_renamed,
    unit_marker_beside, unit_renamed, unit_under_a_moved_directory, units_in_each_other,
    units_side_by_side, unit_of_files, *REMOVAL_WORKLOADS, *ENDING_WORKLOADS, *MEMBER_WORKLOADS,
    unit_back_with_several_writers, unit_back_twice, unit_that_no_marker_ends,
    unit_on_a_full_store, unit_at_the_close_of_the_store, *LONG_WORKLOADS,
]  # fmt: skip
