"""A torn file with a new name never stays the newest of its series: it loses its name."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import NotFoundError
from cxlfs.store import Store
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import QUIET_SECONDS, REST_SECONDS, WEAK_SECONDS, TornMode
from cxlfs.store.series import UNJUDGED_XATTR
from cxlfs.store.unit_rules import Ending
from tests.support.shop import Shop, close, open_for_overwrite
from tests.support.stores import read_file

WHOLE = b"whole" * 3000
TORN = b"torn" * 700
FEWER = b"fewer" * 2900
ODD = b"odd bytes" * 100
FAILED = [Ending.KILLED, Ending.INTERRUPTED, Ending.BADLY]
EVIDENCE = {
    b"whol": Evidence.NONE,
    b"torn": Evidence.STRONG,
    b"fewe": Evidence.WEAK,
    b"odd ": Evidence.UNKNOWN,
}


class Trial:
    """A directory with ``a-1.pt`` and what a test saves beside it. The judge goes by words."""

    def __init__(self, shop: Shop, store: Store) -> None:
        self.shop = shop
        self.ending = Ending.ALIVE
        self.now = 1000.0
        self.asked: list[tuple[bytes, bytes]] = []
        self.watch(store)
        self.save(b"a-1.pt", WHOLE)

    def watch(self, store: Store) -> None:
        self.store = store
        overwrites = store.overwrites
        overwrites.writer = lambda: "a"
        overwrites.ending_of = lambda _writer: self.ending
        overwrites.clock = lambda: self.now

    def save(
        self, name: bytes, data: bytes, *, killed: bool = False, uid: int = 0, flags: int = 0
    ) -> int:
        attributes, handle = self.store.create(1, name, 0o644, uid, 0, os.O_WRONLY | flags)
        self.store.write(handle, 0, data)
        close(self.store, handle, killed=killed)
        return attributes.ino

    def judge(self) -> None:
        self.now += REST_SECONDS
        while (question := self.store.overwrites.next_question()) is not None:
            new = bytes(question.read("new", 0, 4))
            self.asked.append((question.name, bytes(question.read("old", 0, question.old_bytes))))
            self.store.overwrites.judged(question, EVIDENCE[new], "it is cut")

    def settle(self) -> list[bytes]:
        """Judge and decide; the names that there are then."""
        self.judge()
        self.store.overwrites.settle()
        return sorted(self.store.namespace.directory(1).entries or {})

    def reopen(self, *, clean: bool = False, torn: TornMode = TornMode.BACK) -> None:
        self.watch(self.shop.reopen(self.store, clean=clean, torn=torn))

    def kinds(self, kind: str) -> list[str]:
        return [event.message for event in self.shop.events if event.kind == kind]


@pytest.fixture
def trial(shop: Shop) -> Trial:
    return Trial(shop, shop.new(torn=TornMode.BACK))


@pytest.mark.parametrize("ending", FAILED)
@pytest.mark.parametrize("data", [TORN, FEWER])
def test_it_loses_its_name_when_its_writer_failed(
    trial: Trial, ending: Ending, data: bytes
) -> None:
    trial.save(b"a-2.pt", data)
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"], "its writer lives"
    trial.ending = ending
    assert trial.settle() == [b"a-1.pt"]
    assert trial.asked == [(b"a-2.pt", WHOLE)]
    (message,) = trial.kinds("taken-away")
    assert message.startswith("/a-2.pt: it was left incomplete: it is cut; a-1.pt is complete")
    trial.reopen()
    assert trial.settle() == [b"a-1.pt"]


def test_history_has_it_and_it_comes_back_for_good(trial: Trial) -> None:
    trial.save(b"a-2.pt", TORN)
    trial.ending = Ending.KILLED
    trial.settle()
    trial.reopen(clean=True)
    (row,) = trial.store.past.versions_of(1, b"a-2.pt")
    assert row.is_incomplete
    assert trial.settle() == [b"a-1.pt"]
    trial.store.history.undelete(row)
    for _ in range(2):
        assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
        assert read_file(trial.store, trial.store.lookup(1, b"a-2.pt").ino) == TORN
        trial.reopen()


def test_what_a_killed_writer_had_not_closed(trial: Trial) -> None:
    """Also where nobody can read its format."""
    for number, data in enumerate((TORN, ODD), 2):
        trial.save(b"a-%d.pt" % number, data, killed=True)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt"]


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_whole_stays_and_is_the_next_measure(trial: Trial, killed: bool) -> None:
    second = WHOLE + b"2"
    trial.save(b"a-2.pt", second, killed=killed)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
    ino = trial.store.lookup(1, b"a-2.pt").ino
    assert UNJUDGED_XATTR not in (trial.store.namespace.get(ino).xattrs or {})
    trial.save(b"a-3.pt", TORN)
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
    assert trial.asked[-1] == (b"a-3.pt", WHOLE if killed else second)


def test_a_good_end_decides_when_somebody_lists_the_directory(trial: Trial) -> None:
    ino = trial.save(b"a-2.pt", TORN)
    trial.ending = Ending.WELL
    trial.now += QUIET_SECONDS
    assert b"a-2.pt" in trial.settle()
    trial.store.overwrites.wait_for(ino, opens=False)
    assert b"a-2.pt" in trial.settle(), "another program may go on with it"
    assert not trial.store.overwrites.wait_below(1)
    assert b"a-2.pt" not in trial.settle()
    trial.save(b"a-2.pt", TORN)
    assert trial.store.overwrites.wait_below(1), "who lists the directory waits for the judge"
    trial.judge()
    assert not trial.store.overwrites.wait_below(1)
    with pytest.raises(NotFoundError):
        trial.store.lookup(1, b"a-2.pt")


def test_fewer_names_and_a_good_end(trial: Trial) -> None:
    trial.save(b"a-2.pt", FEWER)
    trial.ending = Ending.WELL
    trial.now += max(QUIET_SECONDS, WEAK_SECONDS)
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
    assert len(trial.kinds("torn")) == 1
    trial.reopen()
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"], "it is not judged again"


@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_at_a_power_cut_and_at_an_unmount(trial: Trial, is_judged: bool, clean: bool) -> None:
    trial.save(b"a-2.pt", TORN)
    if is_judged:
        trial.judge()
    trial.reopen(clean=clean)
    assert trial.settle() == [b"a-1.pt"]


def test_a_long_save_that_a_power_cut_ends(trial: Trial) -> None:
    _attributes, handle = trial.store.create(1, b"a-2.pt", 0o644, 0, 0, os.O_WRONLY)
    trial.store.write(handle, 0, TORN)
    trial.store.commits.commit_all()
    trial.reopen()
    assert trial.settle() == [b"a-1.pt"]


@pytest.mark.parametrize(
    ("name", "uid"), [(b"b-2.pt", 0), (b"a.pt", 0), (b"a-2.pt.tmp", 0), (b"a-2.pt", 7)]
)
def test_only_the_same_series_of_the_same_user(trial: Trial, name: bytes, uid: int) -> None:
    trial.save(name, TORN, uid=uid)
    trial.ending = Ending.KILLED
    assert name in trial.settle()
    assert not trial.asked


def test_programs_that_copy_and_formats_that_nobody_knows(trial: Trial) -> None:
    trial.ending = Ending.KILLED
    trial.store.overwrites.copies_files = lambda _writer: True
    trial.save(b"a-2.pt", TORN)
    trial.store.overwrites.copies_files = lambda _writer: False
    trial.store.overwrites.judges_new = lambda name, _head: not name.endswith(b".log")
    trial.save(b"run-1.log", WHOLE)
    trial.save(b"run-2.log", TORN, killed=True)
    assert trial.settle() == [b"a-1.pt", b"a-2.pt", b"run-1.log", b"run-2.log"]


def test_a_name_that_somebody_gave_it_stays(trial: Trial) -> None:
    trial.save(b"a-2.pt", TORN)
    trial.store.rename(1, b"a-2.pt", 1, b"a-3.pt")
    linked = trial.save(b"a-4.pt", TORN)
    trial.store.link(linked, 1, b"other")
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt", b"a-3.pt", b"a-4.pt", b"other"]
    trial.reopen()
    assert trial.settle() == [b"a-1.pt", b"a-3.pt", b"a-4.pt", b"other"]


def test_a_torn_overwrite_of_a_new_file(trial: Trial) -> None:
    """What it had first is whole: that comes back, and stays."""
    ino = trial.save(b"a-2.pt", WHOLE)
    close(trial.store, open_for_overwrite(trial.store, b"a-2.pt", TORN))
    trial.ending = Ending.KILLED
    trial.settle()
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
    assert read_file(trial.store, ino) == WHOLE


def test_two_torn_saves_of_one_new_name(trial: Trial) -> None:
    trial.save(b"a-2.pt", TORN)
    close(trial.store, open_for_overwrite(trial.store, b"a-2.pt", TORN))
    trial.ending = Ending.KILLED
    for _ in range(3):
        names = trial.settle()
    assert names == [b"a-1.pt"]


def test_modes_that_report_or_do_nothing(trial: Trial) -> None:
    trial.reopen(torn=TornMode.REPORT)
    trial.ending = Ending.KILLED
    trial.save(b"a-2.pt", TORN)
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
    assert len(trial.kinds("torn")) == 1
    trial.reopen(torn=TornMode.OFF)
    trial.save(b"a-3.pt", TORN)
    assert trial.settle() == [b"a-1.pt", b"a-2.pt", b"a-3.pt"]
    trial.reopen()
    assert trial.settle() == [b"a-1.pt", b"a-2.pt", b"a-3.pt"]


def test_many_new_files_are_settled_in_few_records(trial: Trial) -> None:
    for number in range(2, 302):
        trial.save(b"a-%d.pt" % number, b"whole")
    before = trial.store.volume.last_lsn
    trial.settle()
    trial.settle()
    assert trial.store.volume.last_lsn - before == 2
    assert not trial.store.overwrites.has_any


def test_saves_that_follow_at_once(trial: Trial) -> None:
    """The file before is not judged yet, and the one before that is removed."""
    trial.save(b"a-2.pt", WHOLE)
    trial.store.unlink(1, b"a-1.pt")
    trial.save(b"a-3.pt", TORN)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-2.pt"]


def test_torn_ones_one_after_the_other(trial: Trial) -> None:
    """A program goes on after each exception."""
    for number in (2, 3, 4):
        trial.save(b"a-%d.pt" % number, TORN)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt"]
    assert {old for _name, old in trial.asked} == {WHOLE}


def test_the_file_before_is_removed_meanwhile(trial: Trial) -> None:
    trial.save(b"a-0.pt", WHOLE)
    trial.settle()
    trial.save(b"a-2.pt", TORN)
    trial.store.unlink(1, b"a-1.pt")
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-0.pt"], "there is another one"
    trial.save(b"a-2.pt", TORN)
    trial.store.unlink(1, b"a-0.pt")
    assert trial.settle() == [b"a-2.pt"], "nothing is better"


@pytest.mark.parametrize("is_published", [False, True])
def test_what_a_program_has_synced_stays(trial: Trial, is_published: bool) -> None:
    """It wants that to be there whatever happens."""
    _attributes, handle = trial.store.create(1, b"a-2.pt", 0o644, 0, 0, os.O_WRONLY)
    trial.store.write(handle, 0, TORN)
    if is_published:
        trial.store.commits.commit_all()
    trial.store.fsync(handle)
    trial.store.write(handle, len(TORN), TORN)
    close(trial.store, handle, killed=True)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
    trial.reopen()
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]


def test_a_name_that_is_claimed_stays(trial: Trial) -> None:
    """Two programs that open it with O_EXCL never both get it."""
    trial.save(b"a-2.pt", TORN, flags=os.O_EXCL)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]


def test_what_was_given_to_another_user_stays(trial: Trial) -> None:
    ino = trial.save(b"a-2.pt", TORN)
    trial.store.set_attributes(ino, uid=1000)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]


def test_a_killed_writer_leaves_holes(trial: Trial) -> None:
    """As NumPy's open_memmap does: by its format it is whole."""
    _attributes, handle = trial.store.create(1, b"a-2.pt", 0o644, 0, 0, os.O_WRONLY)
    trial.store.write(handle, 0, WHOLE)
    trial.store.set_attributes(trial.store.lookup(1, b"a-2.pt").ino, size=1 << 20)
    close(trial.store, handle, killed=True)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt"]


def test_a_link_to_the_file_before_changes_nothing(trial: Trial) -> None:
    trial.store.link(trial.store.lookup(1, b"a-1.pt").ino, 1, b"best.pt")
    trial.save(b"a-2.pt", TORN)
    trial.ending = Ending.KILLED
    assert trial.settle() == [b"a-1.pt", b"best.pt"]


def test_many_other_names_between(trial: Trial) -> None:
    for number in range(600):
        trial.store.make_directory(1, b"log%d" % number, 0o755, 0, 0)
    for number in range(2, 9):
        trial.ending = Ending.ALIVE
        trial.save(b"a-%d.pt" % number, TORN)
        trial.ending = Ending.KILLED
        assert b"a-%d.pt" % number not in trial.settle()
    trial.save(b"a-9.pt", TORN)
    trial.reopen()
    assert b"a-9.pt" not in trial.settle()


def test_many_torn_ones_at_once(trial: Trial) -> None:
    for number in range(2, 1502):
        trial.save(b"a-%d.pt" % number, b"torn")
    trial.ending = Ending.KILLED
    for _ in range(2):
        names = trial.settle()
    assert names == [b"a-1.pt"]


def test_a_file_that_another_program_goes_on_with_stays(trial: Trial) -> None:
    ino = trial.save(b"a-2.pt", TORN)
    trial.ending = Ending.WELL
    trial.judge()
    close(trial.store, trial.store.open_file(ino, os.O_WRONLY | os.O_APPEND))
    assert not trial.store.overwrites.wait_below(1)
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
    trial.reopen()
    assert trial.settle() == [b"a-1.pt", b"a-2.pt"]
