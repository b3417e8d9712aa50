"""A torn file never replaces a whole one for good: the version before is held meanwhile."""

from __future__ import annotations

import os
from collections.abc import Hashable

import pytest

from cxlfs.daemon.history_request import HANDLERS
from cxlfs.errors import BusyError, NoAttributeError, NoSpaceError, NotFoundError
from cxlfs.media import Granularity
from cxlfs.store import Store
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import (
    HEAD_BYTES,
    QUIET_SECONDS,
    REST_SECONDS,
    WEAK_SECONDS,
    Question,
    TornMode,
)
from cxlfs.store.unit_rules import Ending
from tests.support.shop import Shop, close, open_for_overwrite, until_no_space
from tests.support.stores import read_file, write_file

OLD = b"whole" * 3000
TORN = b"torn" * 700
FEWER = b"fewer" * 2900
NEW = b"whole, and newer" * 1000
STATE = b"user.cxlfs.state"


class Trial:
    """One file of a store whose judge goes by the first word, and its writers, with their ends."""

    def __init__(self, shop: Shop, store: Store) -> None:
        self.shop = shop
        self.endings: dict[Hashable, Ending] = {}
        self.writer: Hashable = "a"
        self.now = 1000.0
        self.store = store
        self.watch(store)
        self.ino = write_file(store, 1, b"a.pt", OLD)

    def watch(self, store: Store) -> None:
        self.store = store
        overwrites = store.overwrites
        overwrites.writer = lambda: self.writer
        overwrites.ending_of = lambda writer: self.endings.get(writer, Ending.ALIVE)
        overwrites.clock = lambda: self.now

    def save(self, data: bytes, *, killed: bool = False) -> None:
        close(self.store, open_for_overwrite(self.store, b"a.pt", data), killed=killed)

    def judge(self) -> list[bytes]:
        """Answer all questions; the new contents that were asked about."""
        asked = []
        self.now += REST_SECONDS
        while (question := self.store.overwrites.next_question()) is not None:
            asked.append(bytes(question.read("new", 0, question.new_bytes)))
            self.store.overwrites.judged(question, *verdict(question))
        return asked

    def end(self, ending: Ending) -> None:
        self.endings[self.writer] = ending

    def settle(self) -> bytes:
        """Judge and decide; what the file is then."""
        self.judge()
        self.store.overwrites.settle()
        return self.content

    @property
    def content(self) -> bytes:
        return read_file(self.store, self.ino)

    @property
    def state(self) -> bytes:
        return self.store.get_xattr(self.ino, STATE)

    def reopen(self, *, clean: bool = False, torn: TornMode = TornMode.BACK) -> None:
        self.watch(self.shop.reopen(self.store, clean=clean, torn=torn))


def verdict(question: Question) -> tuple[Evidence, str]:
    new = question.read("new", 0, 5)
    old = question.read("old", 0, question.old_bytes)
    assert old == OLD or old.startswith(NEW[:5])
    if new.startswith(b"torn"):
        return Evidence.STRONG, "it is cut"
    return (Evidence.WEAK, "a name is missing") if new == b"fewer" else (Evidence.NONE, "")


@pytest.fixture
def trial(shop: Shop, granularity: Granularity) -> Trial:
    return Trial(shop, shop.new(granularity=granularity, torn=TornMode.BACK))


@pytest.mark.parametrize("ending", [Ending.KILLED, Ending.INTERRUPTED, Ending.BADLY])
@pytest.mark.parametrize("data", [TORN, FEWER, b""])
def test_a_torn_file_goes_back_when_its_writer_failed(
    trial: Trial, ending: Ending, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trial.store.get_attributes(trial.ino)
    trial.save(data)
    if not data:
        monkeypatch.setattr(f"{__name__}.verdict", lambda _question: (Evidence.STRONG, "empty"))
    assert trial.settle() == data, "its writer lives"
    trial.end(ending)
    assert trial.settle() == OLD
    assert trial.store.get_attributes(trial.ino).mtime_ns == before.mtime_ns
    assert trial.state == b"complete"
    events = [event.kind for event in trial.shop.events]
    assert events.count("reverted") == 1
    aside = [e.size_bytes for e in trial.store.list_checkpoints() if e.kept_aside]
    assert aside == [len(data)], "what was torn is kept aside"
    trial.reopen()
    assert trial.settle() == OLD


@pytest.mark.parametrize("times", [1, 3])
def test_a_long_save_is_torn(trial: Trial, times: int) -> None:
    """The periodic commit has kept some of it aside, where the version before is held then."""
    ino = write_file(trial.store, 1, b"a.pt", OLD)
    handle = open_for_overwrite(trial.store, b"a.pt", b"")
    for number in range(times):
        trial.store.write(handle, number * 9000, TORN)
        trial.store.commits.commit_all()
        assert trial.store.namespace.get(ino).aside is not None
    trial.store.write(handle, times * 9000, TORN)
    close(trial.store, handle)
    assert trial.settle().startswith(TORN)
    assert trial.state == b"incomplete"
    trial.reopen()
    assert trial.store.namespace.get(ino).held is not None
    trial.end(Ending.INTERRUPTED)
    assert trial.settle() == OLD


def test_a_long_save_is_whole(trial: Trial) -> None:
    handle = open_for_overwrite(trial.store, b"a.pt", NEW)
    trial.store.commits.commit_all()
    close(trial.store, handle)
    assert trial.settle() == NEW
    assert not trial.store.versions.asides
    trial.reopen()
    assert trial.content == NEW
    assert trial.state == b"complete"


def test_while_the_writer_lives_the_state_says_that_the_file_is_torn(trial: Trial) -> None:
    trial.save(TORN)
    assert trial.state == b"complete", "nobody has looked yet"
    assert trial.settle() == TORN
    assert trial.state == b"incomplete"
    (entry,) = trial.store.list_checkpoints()
    assert (entry.state, entry.reason) == ("incomplete", "it is cut; the version before is kept")
    assert [event.kind for event in trial.shop.events].count("torn") == 1
    trial.end(Ending.KILLED)
    trial.settle()


def test_a_whole_file_is_never_taken_back(trial: Trial) -> None:
    trial.save(NEW)
    assert trial.settle() == NEW
    assert not trial.store.versions.asides, "what it replaced is free"
    assert not trial.store.overwrites.has_any
    trial.end(Ending.KILLED)
    assert trial.settle() == NEW
    trial.reopen()
    assert trial.settle() == NEW


@pytest.mark.parametrize("ending", [Ending.WELL, Ending.UNKNOWN])
def test_a_cut_file_of_a_program_that_ended_well_goes_back_a_little_later(
    trial: Trial, ending: Ending
) -> None:
    """Another program may be going to complete it."""
    trial.save(TORN)
    trial.end(ending)
    assert trial.settle() == TORN
    trial.now += QUIET_SECONDS - 1
    assert trial.settle() == TORN
    trial.now += 1
    assert trial.settle() == OLD


def test_or_at_once_where_somebody_reads_it(trial: Trial) -> None:
    trial.save(TORN)
    trial.end(Ending.WELL)
    assert trial.settle() == TORN
    overwrites = trial.store.overwrites
    assert not overwrites.wait_for(trial.ino, opens=False)
    assert trial.content == TORN
    assert not overwrites.wait_for(trial.ino, opens=True)
    assert trial.content == OLD


def test_readers_wait_for_the_judge(trial: Trial) -> None:
    woken = []
    trial.store.overwrites.on_question = lambda: woken.append(True)
    trial.save(TORN)
    assert not trial.store.overwrites.wait_for(trial.ino, opens=True), "the writer lives"
    trial.end(Ending.KILLED)
    assert trial.store.overwrites.wait_for(trial.ino, opens=True)
    assert woken
    trial.judge()
    assert not trial.store.overwrites.wait_for(trial.ino, opens=True)
    assert trial.content == OLD


def test_readers_wait_for_the_release_of_a_writer_that_has_ended(trial: Trial) -> None:
    """The kernel sends it when the process is gone, and its parent may have begun anew by then."""
    handle = open_for_overwrite(trial.store, b"a.pt", TORN)
    trial.store.flush(handle, writer_killed=False)
    trial.end(Ending.INTERRUPTED)
    overwrites = trial.store.overwrites
    assert overwrites.wait_for(trial.ino, opens=False)
    assert trial.judge() == []
    trial.store.release(handle)
    assert overwrites.wait_for(trial.ino, opens=False)
    trial.judge()
    assert not overwrites.wait_for(trial.ino, opens=False)
    assert trial.content == OLD


def test_but_not_for_ever(trial: Trial) -> None:
    trial.save(TORN)
    trial.end(Ending.KILLED)
    assert trial.store.overwrites.wait_for(trial.ino, opens=True)
    trial.now += 5
    assert not trial.store.overwrites.wait_for(trial.ino, opens=True)
    assert trial.settle() == OLD


def test_fewer_names_and_a_good_end_are_only_reported(trial: Trial) -> None:
    trial.save(FEWER)
    trial.end(Ending.WELL)
    trial.now += QUIET_SECONDS
    for _ in range(2):
        assert trial.settle() == FEWER
        assert trial.state == b"incomplete"
        assert len(trial.store.versions.asides) == 1, "the version before is there"
        trial.reopen()
    trial.store.overwrites.back(trial.store.namespace.get(trial.ino), "the user wants it")
    assert trial.content == OLD


def test_a_save_over_what_was_reported_is_judged_anew(trial: Trial) -> None:
    trial.save(FEWER)
    trial.end(Ending.WELL)
    trial.now += QUIET_SECONDS
    assert trial.settle() == FEWER
    trial.writer = "b"
    trial.save(TORN)
    trial.reopen()
    assert trial.settle() == OLD


def test_a_user_chooses(trial: Trial) -> None:
    """What went back comes again, and goes again."""
    trial.save(TORN)
    trial.end(Ending.KILLED)
    assert trial.settle() == OLD
    for content, state in ((TORN, b"incomplete"), (OLD, b"complete"), (TORN, b"incomplete")):
        trial.store.set_xattr(trial.ino, b"user.cxlfs.restore", b"")
        assert (trial.settle(), trial.state) == (content, state)
        trial.reopen()
        assert (trial.settle(), trial.state) == (content, state)


def test_a_user_chooses_between_whole_versions(trial: Trial) -> None:
    """Neither becomes incomplete by that."""
    trial.save(NEW)
    for content in (OLD, NEW, OLD, NEW):
        trial.store.set_xattr(trial.ino, b"user.cxlfs.restore", b"")
        assert (read_file(trial.store, trial.ino), trial.state) == (content, b"complete")


def test_there_must_be_something_to_restore(trial: Trial) -> None:
    with pytest.raises(NoAttributeError, match="nothing is kept aside"):
        trial.store.set_xattr(trial.ino, b"user.cxlfs.restore", b"")
    trial.save(TORN)
    handle = trial.store.open_file(trial.ino, os.O_WRONLY)
    with pytest.raises(BusyError, match="being written"):
        trial.store.set_xattr(trial.ino, b"user.cxlfs.restore", b"")
    close(trial.store, handle)


def test_fewer_names_long_before_a_failure_are_meant(trial: Trial) -> None:
    trial.save(FEWER)
    trial.now += WEAK_SECONDS + 1
    trial.end(Ending.KILLED)
    assert trial.settle() == FEWER


@pytest.mark.parametrize("data", [TORN, FEWER])
@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_at_a_power_cut_and_at_an_unmount(
    trial: Trial, data: bytes, is_judged: bool, clean: bool
) -> None:
    """Nobody knows how the writer would have ended."""
    trial.save(data)
    if is_judged:
        trial.judge()
    trial.reopen(clean=clean)
    assert trial.settle() == OLD
    trial.reopen(clean=True)
    assert trial.settle() == OLD


def test_a_whole_file_stays_after_a_power_cut(trial: Trial) -> None:
    trial.save(NEW)
    trial.reopen()
    assert trial.content == NEW
    assert trial.settle() == NEW
    assert not trial.store.versions.asides


def test_a_store_that_is_mounted_without_it_forgets_nothing(trial: Trial) -> None:
    trial.save(TORN)
    trial.reopen(torn=TornMode.OFF)
    assert trial.settle() == TORN
    trial.reopen()
    assert trial.settle() == OLD


def test_saving_again_over_a_torn_file_keeps_the_good_one(trial: Trial) -> None:
    trial.save(TORN)
    trial.judge()
    trial.save(TORN + TORN)
    trial.end(Ending.KILLED)
    assert trial.settle() == OLD


def test_saving_again_replaces_what_was_torn(trial: Trial) -> None:
    trial.save(TORN)
    trial.judge()
    trial.save(NEW)
    assert trial.settle() == NEW
    assert trial.state == b"complete"
    trial.end(Ending.KILLED)
    assert trial.settle() == NEW


def test_the_newest_whole_version_comes_back(trial: Trial) -> None:
    trial.save(NEW)
    trial.judge()
    trial.store.overwrites.settle()
    trial.save(TORN)
    trial.end(Ending.KILLED)
    assert trial.settle() == NEW


def test_a_kill_in_the_middle_of_the_next_save_meets_what_was_torn(trial: Trial) -> None:
    trial.save(TORN)
    trial.save(NEW[:100], killed=True)
    trial.end(Ending.KILLED)
    assert trial.settle() == OLD


def test_fsync_within_the_save(trial: Trial) -> None:
    """The version before is held from there on, whatever the rest of the save does."""
    handle = open_for_overwrite(trial.store, b"a.pt", TORN)
    trial.store.fsync(handle)
    assert trial.judge() == [], "it is being written"
    trial.store.write(handle, len(TORN), TORN)
    close(trial.store, handle)
    assert trial.judge() == [TORN * 2]
    trial.end(Ending.KILLED)
    assert trial.settle() == OLD


def test_a_change_in_place_ends_the_wait(trial: Trial) -> None:
    """As ``cat a > f; cat b >> f`` makes it, and an archive that is added to."""
    trial.save(TORN)
    trial.judge()
    handle = trial.store.open_file(trial.ino, os.O_WRONLY)
    trial.store.write(handle, len(TORN), b"the rest")
    close(trial.store, handle)
    trial.end(Ending.KILLED)
    assert trial.settle() == TORN + b"the rest"
    assert not trial.store.versions.asides
    assert trial.state == b"complete"


def test_several_writers_decide_together(trial: Trial) -> None:
    trial.save(TORN)
    trial.end(Ending.KILLED)
    trial.writer = "b"
    trial.store.overwrites.written(trial.store.namespace.get(trial.ino))
    assert trial.settle() == TORN
    trial.end(Ending.WELL)
    assert trial.settle() == OLD


def test_a_downloader_continues_what_it_left(trial: Trial) -> None:
    trial.store.overwrites.is_exempt = lambda writer: writer == "a"
    trial.save(TORN)
    trial.end(Ending.KILLED)
    assert trial.settle() == TORN


def test_formats_that_nobody_knows_are_not_held(trial: Trial) -> None:
    trial.store.overwrites.judges = lambda name, head: (name, head) != (b"a.pt", OLD[:HEAD_BYTES])
    trial.save(TORN)
    assert not trial.store.versions.asides


def test_what_cannot_be_stored_is_tried_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader gets the torn file, and no error that is not its own."""
    trial.save(TORN)
    trial.end(Ending.KILLED)
    trial.judge()

    def full(*_: object, **_others: object) -> tuple[int, int]:
        raise NoSpaceError("no room for a record")

    with monkeypatch.context() as patch:
        patch.setattr(trial.store.volume, "commit", full)
        assert not trial.store.overwrites.wait_for(trial.ino, opens=True)
        assert trial.settle() == TORN
    assert trial.settle() == OLD


def test_a_removed_file_is_forgotten(trial: Trial) -> None:
    trial.save(TORN)
    trial.judge()
    trial.store.unlink(1, b"a.pt")
    trial.end(Ending.KILLED)
    assert not trial.store.overwrites.settle()
    assert not trial.store.overwrites.has_any


def test_only_reported(shop: Shop) -> None:
    trial = Trial(shop, shop.new(torn=TornMode.REPORT))
    trial.save(TORN)
    trial.end(Ending.KILLED)
    assert trial.settle() == TORN
    assert trial.state == b"incomplete"
    trial.reopen(torn=TornMode.REPORT)
    assert trial.state == b"incomplete"


def test_switched_off(shop: Shop) -> None:
    trial = Trial(shop, shop.new())
    trial.save(TORN)
    assert not trial.store.versions.asides
    trial.end(Ending.KILLED)
    assert trial.settle() == TORN


def test_a_full_store_gives_up_what_is_held_before_a_write_fails(trial: Trial) -> None:
    store = trial.store
    trial.save(b"unjudged" * 20_000)
    trial.save(b"unjudged" * 20_000)
    count = until_no_space(lambda n: write_file(store, 1, b"%d" % n, bytes(50_000)))
    assert not store.versions.asides
    assert [event.kind for event in trial.shop.events].count("given-up") == 1
    assert count > 1


def test_of_a_torn_file_the_torn_content_is_given_up(trial: Trial) -> None:
    store = trial.store
    trial.save(TORN * 50)
    trial.judge()
    until_no_space(lambda n: write_file(store, 1, b"%d" % n, bytes(50_000)))
    assert trial.content == OLD
    assert not store.versions.asides


def test_a_snapshot_of_the_metadata_knows_what_is_held(trial: Trial) -> None:
    trial.save(TORN)
    trial.store.volume.rollover()
    trial.reopen()
    trial.store.volume.rollover()
    assert trial.settle() == OLD
    trial.store.volume.rollover()
    trial.reopen()
    assert trial.settle() == OLD


def contents(trial: Trial) -> list[bytes]:
    """What history has."""
    return [bytes(row.data.read(0, row.data.size)) for row in trial.store.past if row.data]


def test_a_change_in_place_leaves_both_contents_in_history(trial: Trial) -> None:
    """What was held, and what was changed: one row does not take the place of the other."""
    trial.save(TORN)
    trial.judge()
    handle = trial.store.open_file(trial.ino, os.O_WRONLY)
    trial.store.write(handle, 0, b"other")
    close(trial.store, handle)
    assert sorted(contents(trial)) == [TORN, OLD]


@pytest.mark.parametrize("how", ["unlinked", "renamed over"])
def test_what_is_held_of_a_file_that_goes_is_in_history(trial: Trial, how: str) -> None:
    trial.save(TORN)
    trial.judge()
    if how == "unlinked":
        trial.store.unlink(1, b"a.pt")
    else:
        write_file(trial.store, 1, b"b.pt", NEW)
        trial.store.rename(1, b"b.pt", 1, b"a.pt")
    assert sorted(contents(trial)) == [TORN, OLD]


@pytest.mark.parametrize("clean", [False, True])
def test_an_unmount_in_the_middle_of_a_save_keeps_what_is_held(trial: Trial, clean: bool) -> None:
    handle = open_for_overwrite(trial.store, b"a.pt", TORN)
    trial.store.fsync(handle)
    trial.store.write(handle, len(TORN), b"more")
    trial.reopen(clean=clean)
    assert trial.settle() == OLD


def test_a_version_is_found_by_the_commits_at_which_it_was_there(trial: Trial) -> None:
    """Its row is made when it is not held any more, long after it was overwritten."""
    first = trial.store.volume.last_lsn
    trial.save(NEW)
    second = trial.store.volume.last_lsn
    write_file(trial.store, 1, b"b", b"1")
    later = trial.store.volume.last_lsn
    trial.settle()
    assert contents(trial) == [OLD]
    restore = {"path": "/a.pt", "to": "/before.pt"}
    for commit in (second, later):
        with pytest.raises(NotFoundError):
            list(HANDLERS["restore"](trial.store, {**restore, "at": commit}))
    list(HANDLERS["restore"](trial.store, {**restore, "at": first}))
    assert read_file(trial.store, trial.store.lookup(1, b"before.pt").ino) == OLD
    trial.save(OLD)
    trial.settle()
    list(HANDLERS["restore"](trial.store, {**restore, "at": later}))
    assert read_file(trial.store, trial.store.lookup(1, b"before.pt").ino) == NEW
