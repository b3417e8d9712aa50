"""Sets and torn overwrites of the model: when they begin, what ends them, and power cuts.

Other modules do the verbs (``world``) and say what must be there then (``expected``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from cxlfs.media import MemoryMedia
from cxlfs.store import Store, StoreOptions
from cxlfs.store.namespace import Inode
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import QUIET_SECONDS, REST_SECONDS, TornMode
from cxlfs.store.unit_rules import (
    FILE_MARKERS,
    Ending,
    Rule,
    UnitsMode,
    matches,
    rule_of_contents,
)
from tests.support.stores import format_small
from tests.support.unit_scenes import finish_work
from tests.support.user_histories.expected import Expected, require
from tests.support.user_histories.found import adopt, contents_of, everything_in
from tests.support.user_histories.model import (
    Directory,
    File,
    Path,
    Picture,
    Process,
    is_torn,
    paths_of,
)
from tests.support.user_histories.sets import (
    ChangeSet,
    Outcome,
    counts,
    is_log_name,
    rule_beside,
    rule_of,
)

ROOT_UID = 0
SIZE_BYTES = 2 << 20
MURKY_SECONDS = 60.0
"""After so long nothing becomes of a set any more."""
OPTIONS = StoreOptions(units=UnitsMode.AUTO, torn=TornMode.BACK)


class Settles:
    """``pictures``: what was committed at which commit; ``contents``: of each file, the same."""

    def __init__(self) -> None:
        self.media = MemoryMedia(SIZE_BYTES)
        format_small(self.media)
        self.trace: list[str] = []
        self.root = Directory(1, ROOT_UID)
        self.now = 100.0
        self.moment = 0
        self.present = Process("nobody", ROOT_UID)
        self.endings: dict[Hashable, Ending] = {}
        self.sets: list[ChangeSet] = []
        self.finishers: dict[Hashable, str] = {}
        self.savers: set[tuple[Hashable, str, Directory | None]] = set()
        """Who has finished sets of which rule in which directory."""
        self.maybe_savers: set[tuple[Hashable, str, Directory | None]] = set()
        """The same, of sets of which nothing is promised."""
        self.maybe_finishers: set[Hashable] = set()
        self.ever_committed: set[bytes] = set()
        self.seen: dict[int, File] = {}
        """Every file that had a name, by number."""
        self.meant: dict[Path, set[File]] = {}
        self.meant_in: dict[tuple[int, bytes], set[File]] = {}
        """The same, by the number of the directory: it may have had another name."""
        self.directories_at: dict[Path, set[int]] = {}
        """Numbers of the directories that had each path."""
        self.pictures: dict[int, Picture] = {}
        self.contents: dict[int, dict[File, bytes]] = {}
        self.attach(Store.open(self.media, OPTIONS))

    def attach(self, store: Store) -> None:
        self.store = store
        store.on_event = lambda _event: None
        store.units.clock = store.overwrites.clock = lambda: self.now
        store.units.user = lambda: self.present.uid
        store.units.writer = store.overwrites.writer = lambda: self.present
        store.units.ending_of = store.overwrites.ending_of = self.ending_of

    def ending_of(self, process: Hashable) -> Ending:
        return self.endings.get(process, Ending.ALIVE)

    # --- before and after each verb -------------------------------------------------------------

    def begin(self, process: Process, text: str) -> None:
        self.present = process
        self.now += 0.5
        self.moment += 1
        self.trace.append(f"{process.name} ({process.uid}): {text}")

    def end(self) -> None:
        self._judge()
        for each in list(self.sets):
            if not each.is_murky and self._outcome(each) is Outcome.STAYS:
                self._finish(each)
        if any(self._outcome(each) is Outcome.BACK for each in self.sets) or self._may_end():
            self.settle()  # nobody has gone on for long after something went wrong
            return
        self._torn_go_back(crashed=False)
        self.store.units.settle()
        self.store.overwrites.settle()
        self.note()

    def _may_end(self, *, restarts: bool = False) -> list[Path]:
        """New files that are torn and may follow another one of their series: whether they end is
        in tests/store/test_new_files.py.
        """
        return [
            path
            for path, file in self.root.below()
            if is_torn(file.live) and file.held is None
            if restarts or not (file.handles or file.is_dirty)
            if any(48 <= each < 58 for each in path[-1])
        ]

    def note(self) -> None:
        """Remember what is committed."""
        lsn = self.store.volume.last_lsn
        self.pictures[lsn] = self.root.committed()
        for path, file in self.root.below():
            self.meant.setdefault(path, set()).add(file)
            self.seen[file.ino] = file
            above = self.root.find(path[:-1])
            assert above is not None
            self.meant_in.setdefault((above.ino, path[-1]), set()).add(file)
            if file.committed is not None:
                if file.is_linked:
                    self.ever_committed.discard(file.committed)
                else:
                    self.ever_committed.add(file.committed)
        for directory in self.root.directories():
            self.directories_at.setdefault(directory.path, set()).add(directory.ino)
        known = self.seen.values()
        self.contents[lsn] = {file: file.committed for file in known if file.committed is not None}

    def _judge(self) -> None:
        overwrites = self.store.overwrites
        self.now += REST_SECONDS
        while (question := overwrites.next_question()) is not None:
            torn = is_torn(question.read("new", 0, question.new_bytes))
            overwrites.judged(question, Evidence.STRONG if torn else Evidence.NONE, "it is cut")

    # --- sets -----------------------------------------------------------------------------------

    def names_of(self, file: File) -> Iterator[tuple[Directory, bytes]]:
        for path, each in list(self.root.below()):
            above = self.root.find(path[:-1])
            if each is file and isinstance(above, Directory):
                yield above, path[-1]

    def set_of(self, directory: Directory) -> ChangeSet | None:
        found = [each for each in self.sets if each.place is None and directory.is_in(each.top)]
        return found[0] if found else None

    def changing(
        self, directory: Directory, name: bytes, file: File | None = None, *, appends: bool = False
    ) -> None:
        """A name, or the content of a file, is about to change."""
        if file is not None and file.is_linked:
            self._changing_linked(file)
        user, found = self.present.uid, self.set_of(directory)
        if found is not None and found.is_murky:
            self._goes_on(found)
        if appends:
            return
        if found is None or not self._is_confirmed(found, directory, name):
            found = self._begun(directory, name, file)
            if found is None:
                return
        elif user != found.uid:
            found.foreign.add(found.path_of(directory, name))
            if file is not None:
                found.apart.add(file)
                found.changed_by_others.add(file)
            return
        elif is_log_name(name) or (file is not None and not found.belongs(file, name)):
            return
        elif self._ends_before(found):
            self._finish(found)
            self.changing(directory, name, file)
            return
        found.writers.add(self.present)
        found.changed = self.now

    def _is_confirmed(self, found: ChangeSet, directory: Directory, name: bytes) -> bool:
        """What was taken for a set beside others of a saver is one, as far as is known."""
        if not found.is_guess or self.present.uid != found.uid or is_log_name(name):
            return True
        found.is_guess = False
        if directory is found.top and found.rule.knows(name):
            return True
        self.sets.remove(found)
        return False

    def _begun(self, directory: Directory, name: bytes, file: File | None) -> ChangeSet | None:
        """The set that a change begins, if it does."""
        user = self.present.uid
        ruled = rule_of(directory, name)
        if ruled is None or ruled[0].uid != user or is_log_name(name):
            return None
        if not self._begins(*ruled, directory, name):
            return None
        unsure = bool(ruled[1].files) and self._may_be_saver(ruled[1], ruled[0])
        found = self._begin_set(*ruled, changed=file)
        found.is_murky |= unsure and found.is_new
        logs = (each for each in found.top.entries.values() if isinstance(each, File))
        found.is_murky |= any(e.is_log and e.uid == user and not e.handles for e in logs)
        return found

    def _begins(self, top: Directory, rule: Rule, directory: Directory, name: bytes) -> bool:
        """Something that is there changes, or the first thing comes; files alone show a set only
        if a saver makes them.
        """
        at_top = (*directory.path, name)[len(top.path)]
        child = top.entries.get(at_top)
        if isinstance(child, Directory) or (child is not None and child.committed is not None):
            return True
        if any(counts(top, each, name) for name, each in top.entries.items()):
            return False  # a log that was closed may count: nothing is promised then, see below
        return not rule.files or self._is_saver(rule, top) or self._may_be_saver(rule, top)

    def _is_saver(self, rule: Rule, top: Directory) -> bool:
        return (self.present, rule.name, top.parent) in self.savers

    def _may_be_saver(self, rule: Rule, top: Directory) -> bool:
        """It is not promised that it is none."""
        token = self.present, rule.name, top.parent
        unsure = [each for each in self.sets if each.is_murky and self.present in each.writers]
        tokens = {(self.present, each.rule.name, each.top.parent) for each in unsure}
        return token not in self.savers and token in self.maybe_savers | tokens

    def _note_saver(self, directory: Directory, name: bytes, file: File) -> None:
        """What comes last in a set that nobody knew was closed."""
        rule = rule_of_contents(directory.entries.keys())
        if rule is None or name not in rule.done or directory.uid != self.present.uid:
            return
        if file.live and not is_torn(file.live):
            self.savers.add((self.present, rule.name, directory.parent))
            self.finishers[self.present] = rule.name

    def _changing_linked(self, file: File) -> None:
        """Below which of its names a change of the content counts is not promised."""
        for above, name in self.names_of(file):
            ruled, found = rule_of(above, name), self.set_of(above)
            if found is None and ruled is not None:
                found = self._begin_set(*ruled)
            if found is not None:
                found.is_murky, found.changed = True, self.now

    def _ends_before(self, found: ChangeSet) -> bool:
        """Somebody else begins where a set was over, and nobody had looked."""
        if self.present in found.writers or not found.writers or found.is_murky:
            return False
        return self._outcome(found) is Outcome.STAYS

    def set_apart(self, directory: Directory, file: File) -> None:
        """It was opened to be written at its end."""
        found = self.set_of(directory)
        if found is not None:
            found.apart.add(file)

    def _begin_set(self, top: Directory, rule: object, *, changed: File | None = None) -> ChangeSet:
        below = list(top.below())
        early = {f for _, f in below if f.handles and f is not changed}
        old = [
            e for e in top.entries.values() if isinstance(e, Directory) or e.committed is not None
        ]
        made = ChangeSet(
            top,
            rule,  # type: ignore[arg-type]
            uid=self.present.uid,
            is_new=not (old or early),
            began=self.moment - 1,
            changed=self.now,
            before={p: f.committed for p, f in below if f.committed is not None},
            before_files=dict(below),
            apart=set(early),
        )
        for each in list(self.sets):
            if each.is_murky and each.place == (top.parent, top.name):
                self.sets.remove(each)  # it has come back
                made.is_murky = True
        self._follow(top.parent, made)
        self.sets.append(made)
        return made

    def _follow(self, parent: Directory | None, but: ChangeSet) -> None:
        for each in self.sets:
            above = each.top.parent
            if above is parent and each is not but and self.present in each.writers:
                each.followed = True

    def _goes_on(self, murky: ChangeSet) -> None:
        """What anybody changes there may belong to it; or it is over, and the next one begins."""
        murky.changed = self.now
        if self.present in murky.writers:
            return
        for each in self.sets:
            is_beside = each is not murky and each.top.parent is murky.top.parent
            expects = each.rule.expects_marker and each.place is None
            if is_beside and self.present in each.writers and not expects:
                each.is_murky = True

    def making(self, above: Directory, name: bytes, made: Directory) -> None:
        """A directory is about to be made."""
        found = self.set_of(above)
        if found is not None or rule_of(above, None) is not None:
            self.changing(above, name)
            if self.set_of(above) is not None or rule_of(above, None) is not None:
                return
        removed = [each for each in self.sets if each.place == (above, name)]
        if removed and removed[0].uid == self.present.uid:
            (each,) = removed
            each.top, each.place, each.marked, each.followed = made, None, False, False
            each.writers, each.changed, each.was_removed = {self.present}, self.now, True
            each.published, each.spoiled = set(), set()
            self._follow(above, each)
            return
        ruled = rule_of(made, None)
        beside = rule_beside(made)
        if ruled is None and beside is not None:
            known = self._is_saver(beside, made) or self._may_be_saver(beside, made)
            beside = beside if known else None
        rule = ruled[1] if ruled is not None else beside
        if rule is not None:
            self._begin_set(made, rule).was_made = True
            self.sets[-1].is_guess = ruled is None
            self.sets[-1].is_murky |= ruled is None and self._may_be_saver(rule, made)
            self.sets[-1].writers.add(self.present)

    def losing(self, directory: Directory, name: bytes) -> None:
        """A name is about to be taken from what has it."""
        found, file = self.set_of(directory), directory.entries.get(name)
        if found is not None and isinstance(file, File):
            found.losing(found.path_of(directory, name), file)

    def dying(self, directory: Directory, name: bytes) -> None:
        """The same, and it gets no other one."""
        self.losing(directory, name)
        found, file = self.set_of(directory), directory.entries.get(name)
        if not isinstance(file, File) or len(list(self.names_of(file))) != 1:
            return
        if found is None:
            for each in self.sets:  # it had a name there, and left it
                each.not_given(file)
        elif found.uid != self.present.uid or not found.belongs(file, name):
            found.not_given(file)  # it is no change of the set: removed for good

    def clearing(self, directory: Directory, name: bytes) -> None:
        """A saver that begins to remove what it has saved may have finished that."""
        found, file = self.set_of(directory), directory.entries.get(name)
        if found is None or not found.rule.temporary or found.writers != {self.present}:
            return
        found.is_murky = found.is_murky or file in found.published

    def unlinking(self, directory: Directory, name: bytes) -> None:
        """What another user has removed does not come back."""
        self.dying(directory, name)
        found, file = self.set_of(directory), directory.entries[name]
        if found is not None and isinstance(file, File) and found.uid != self.present.uid:
            path = found.path_of(directory, name)
            if file is found.before_files.get(path):
                found.before.pop(path, None)
                found.foreign.discard(path)
            else:
                found.loose.add(path)

    def removing(self, directory: Directory) -> None:
        found = self.set_of(directory)
        is_others = found is not None and {directory.uid, self.present.uid} != {found.uid}
        if found is not None and is_others and directory is not found.top:
            found.removed_of_others.add(directory.path[len(found.top.path) :])
        for each in list(self.sets):
            if each.top is not directory or each.place is not None:
                continue
            is_over = (each.is_new and not each.given) or each.uid != self.present.uid
            if directory.parent is None or (is_over and not each.is_murky):
                self.sets.remove(each)
                continue
            if self._ends_before(each):
                self._finish(each)
                continue
            each.writers.add(self.present)
            each.changed = self.now
            each.place = directory.parent, directory.name
            each.marked = each.followed = False

    def moving(
        self,
        child: File | Directory,
        old_above: Directory,
        old_name: bytes,
        above: Directory,
        name: bytes,
    ) -> None:
        """Something gets another name."""
        into, out_of = self.set_of(above), self.set_of(old_above)
        for each in list(self.sets):
            if each.top is child or each.place == (above, name):
                self._finish(each)
        if into is not None and into is not out_of and self._is_of_the_save(into, child):
            into = None
        if into is not None:
            into.give(child, (old_above, old_name), (above, name))
        if into is out_of and isinstance(child, File):
            return
        if into is not out_of:
            self._crossing(child, (old_above, old_name), into, out_of)
        for each, at in ((out_of, (old_above, old_name)), (into, (above, name))):
            if each is not None and {self.present.uid, child.uid} != {each.uid}:
                path = each.path_of(*at)
                each.loose |= paths_of(path, child)
                each.loose |= {p for p in each.before if p[: len(path)] == path}
                if into is out_of and isinstance(child, Directory):
                    each.went.add(child)  # what was removed from it comes back where it is

    def _crossing(
        self,
        child: File | Directory,
        home: tuple[Directory, bytes],
        into: ChangeSet | None,
        out_of: ChangeSet | None,
    ) -> None:
        if out_of is not None and isinstance(child, File):
            out_of.left.add(child)
        if out_of is not None and isinstance(child, Directory):
            out_of.went.add(child)
            if into is not None:  # which of them has it in the end is not promised
                out_of.is_murky = into.is_murky = True
        if into is not None:
            into.moved[child] = home

    def note_publisher(self, file: File, names: list[tuple[Directory, bytes]]) -> None:
        found = [(self.set_of(above), name) for above, name in names]
        if not any(each is not None and each.belongs(file, name) for each, name in found):
            file.publishers.add(self.present)

    def _is_of_the_save(self, into: ChangeSet, child: File | Directory) -> bool:
        """A file that one of its writers has made elsewhere since it began: it goes with it."""
        if isinstance(child, Directory) or child in into.given or into.is_murky:
            return False
        if child.made <= into.began:
            return False
        return len(child.publishers) == 1 and child.publishers <= into.writers

    def linking(self, file: File, old: bytes, above: Directory, name: bytes) -> None:
        """A file gets one more name."""
        into = self.set_of(above)
        *names, old_name = filter(None, old.split(b"/"))
        old_above = self.root.find(tuple(names))
        if into is None or self._is_of_the_save(into, file):
            return
        if isinstance(old_above, Directory):
            into.give(file, (old_above, old_name), (above, name))

    def named(self, above: Directory, name: bytes, child: File | Directory) -> None:
        """It has its new name."""
        if isinstance(child, File) and child.committed is not None:
            self.published(above, name, child)
            self.closed(above, name, child)

    def closed(self, above: Directory, name: bytes, file: File) -> None:
        """By a program that lives, or renamed."""
        found = self.set_of(above)
        if found is None and name in FILE_MARKERS:
            self._note_saver(above, name, file)
        if found is not None and found.belongs(file, name) and file in found.published:
            found.closed(above, name, file)

    def published(self, above: Directory, name: bytes, file: File) -> None:
        found = self.set_of(above)
        if found is None:
            for each in self.sets:
                if each.top.parent is above and each.place is None:
                    each.seen_beside(name, file)
            return
        if file.uid == found.uid:
            found.contents.add(file.live)
        if found.belongs(file, name):
            found.changed = self.now
            found.seen(above, name, file)

    def published_by_kill(self, file: File) -> None:
        """What a killed writer had begun is there, unfinished: a change as any other."""
        names = list(self.names_of(file))
        self.note_publisher(file, names)
        for above, name in names:
            found = self.set_of(above)
            if found is not None and found.belongs(file, name):
                found.changed = self.now
                found.writers.add(self.present)

    def published_without_name(self, file: File) -> None:
        """With it comes back what never belonged to the set that its name was taken in."""
        for each in self.sets:
            for path, was in each.before_files.items():
                if was is file and file in each.apart:
                    each.losing(path, file)

    def spoil(self, above: Directory, name: bytes, file: File) -> None:
        """A kill has left it unfinished."""
        found = self.set_of(above)
        if found is not None and found.belongs(file, name):
            found.spoiled.add(file)
        for each in self.sets:
            if each.top.parent is above and name in each.rule.done_beside:
                each.is_murky = True

    # --- ends -----------------------------------------------------------------------------------

    def _outcome(self, each: ChangeSet, *, closing: bool = False) -> Outcome:
        lacks = each.is_new and each.place is None and not each.marked
        savers = {(writer, each.rule.name, each.top.parent) for writer in each.writers}
        of_saver = not savers.isdisjoint(self.savers)
        finished = any(self.finishers.get(w) == each.rule.name for w in each.writers)
        by_name = bool(each.rule.directories)
        lacks = lacks and (of_saver if by_name else finished)
        if self._may_lack(each):
            each.is_murky = True
        if lacks and each.rule.done_beside:  # whether it is missed there is not promised
            each.is_murky, lacks = True, False
        maybe = self.maybe_finishers.union(*(e.writers for e in self.sets if e.is_murky))
        if each.is_new and not each.marked and each.writers & maybe:
            each.is_murky = True
        return each.outcome(
            self.endings, self.now, lacks_marker=lacks, closing=closing, of_saver=of_saver
        )

    def _may_lack(self, each: ChangeSet) -> bool:
        """Its writers are gone without its marker. What is promised then of a set that is compared
        with the one before, or beside it, is in tests/store/test_unit_lacks.py.
        """
        if each.place is not None or each.marked or not each.writers:
            return False
        if any(self.ending_of(writer) is not Ending.WELL for writer in each.writers):
            return False
        is_compared = each.was_removed or (not each.is_new and bool(each.rule.files))
        members = each.members()
        torn = any(is_torn(file.live) and file.held for _, file in members)
        needs = [f for path, f in members if matches(path[-1], each.rule.needs)]
        lacks = each.rule.needs and (not needs or any(is_torn(file.live) for file in needs))
        return torn or bool(lacks) or (is_compared and bool(each.rule.done))

    def _finish(self, each: ChangeSet) -> bool:
        """True: what becomes of what it wrote is not promised."""
        self.sets.remove(each)
        if each.is_murky:
            self.maybe_finishers |= each.writers
            self.maybe_savers |= {(who, each.rule.name, each.top.parent) for who in each.writers}
        elif each.marked:
            self.finishers.update(dict.fromkeys(each.writers, each.rule.name))
            self.savers |= {(who, each.rule.name, each.top.parent) for who in each.writers}
        torn = [file for _, file in each.members() if is_torn(file.live)]
        for file in torn:
            file.is_wild = True
        return bool(torn) or each.is_murky

    def _over(self, *, closing: bool = False, crashed: bool = False) -> Expected:
        """Let every set end that does; what must be there then, by the live view."""
        back: list[ChangeSet] = []
        murky = [each for each in self.sets if each.is_murky]
        open_below: list[Path] = []
        for each in list(self.sets):
            outcome = self._outcome(each, closing=closing)
            if each.is_murky:
                open_below += self._over_murky(each, back, is_over=closing or crashed)
            elif outcome is Outcome.BACK or crashed:
                self.sets.remove(each)
                back.append(each)
            elif outcome is Outcome.STAYS and self._finish(each):
                open_below.append(each.top.path)
        self._torn_go_back(crashed=closing or crashed)
        view = self._view(closing=closing, crashed=crashed)
        expected = Expected(dict(view), open_below)
        expected.going = [each.top for each in back]
        expected.committed = set(self.root.committed().values())
        for each in back:
            self.ever_committed -= each.contents - {*each.before.values()}
            self.trace.append(f"  to go back: {b'/'.join(each.top.path).decode()}")
            expected.go_back(each, self.root, view)
        for each in back:
            others = [other.contents for other in {*back, *murky} - {each}]
            expected.give_back(each, self.root, each.gone.union(*others))
        for each in self.sets:
            each.gone = each.gone.union(*(other.contents for other in back))
        for each in murky:
            top = each.top.path
            below = {c for path, c in view.items() if path[: len(top)] == top}
            self.ever_committed -= below | each.contents
            expected.anywhere |= below | each.contents | {*each.before.values()}
        born = {content for each in back for content in each.contents}
        expected.anywhere |= expected.somewhere
        expected.somewhere -= born
        expected.committed -= born
        expected.open_below += [path for path, file in self.root.below() if file.is_wild]
        expected.open_below += self._may_end(restarts=closing or crashed)
        return expected

    def _over_murky(
        self, each: ChangeSet, back: list[ChangeSet], *, is_over: bool
    ) -> Iterator[Path]:
        """Where nothing is promised on its account."""
        yield from (each.top.path, *each.others_of(self.root))
        if is_over:
            self.sets.remove(each)
            back.append(each)
        elif self.now - each.changed > MURKY_SECONDS and not each.is_written():
            self._finish(each)

    def _view(self, *, closing: bool, crashed: bool) -> Picture:
        if crashed:
            return self.root.committed()
        return {
            path: file.committed
            if closing and file.is_emptied and file.committed is not None
            else file.live
            for path, file in self.root.below()
        }

    def _torn_go_back(self, *, crashed: bool) -> None:
        """Torn overwrites outside sets, whose writers are gone."""
        for path, file in list(self.root.below()):
            if file.held is None or ((file.is_dirty or file.handles) and not crashed):
                continue
            if not is_torn(file.committed or b""):
                file.held = None
                file.overwriters.clear()
                continue
            above = self.root.find(path[:-1])
            said = {self.ending_of(each) for each in file.overwriters}
            in_set = isinstance(above, Directory) and self.set_of(above) is not None
            if in_set or (Ending.ALIVE in said and not crashed):
                continue
            if file.ended_at is None:
                file.ended_at = self.now
            quiet = self.now - max(file.closed_at, file.ended_at) >= QUIET_SECONDS
            if crashed or said - {Ending.WELL} or quiet:
                file.live = file.committed = file.held
                file.held, file.is_dirty = None, False

    def settle(self) -> None:
        """What has become of everything is decided, and compared. Raises Violation."""
        self._judge()
        expected = self._over()
        self.store.overwrites.settle()
        self.store.units.settle()
        finish_work(self.store)
        self.store.overwrites.settle()
        self._compare(expected)

    def restart(self, *, clean: bool) -> None:
        """A power cut, or an unmount; then the next mount. Raises Violation."""
        self._judge()
        self.trace.append("unmount" if clean else "power cut")
        expected = self._over(closing=clean, crashed=not clean)
        if clean:
            self.store.close()
        else:
            self.store.abandon()
        self.attach(Store.open(self.media, OPTIONS))
        self._judge()
        self.store.overwrites.settle()
        finish_work(self.store)
        for _, file in self.root.below():
            file.handles, file.is_dirty, file.is_emptied, file.is_log = 0, False, False, False
            file.overwriters = set()
        self._compare(expected)

    # --- comparing ------------------------------------------------------------------------------

    def _compare(self, expected: Expected) -> None:
        found = contents_of(self.store)
        expected.compare(found)
        if expected.going:
            require(expected.committed, everything_in(self.store))
        adopt(self.root, self.store, found, self._come_back)
        self.note()

    def _come_back(self, inode: Inode) -> File:
        """A file has a name again that had none; or it is one that the model does not know."""
        file = self.seen.get(inode.ino)
        if file is None or file.uid != inode.uid:
            return File(inode.ino, inode.uid, born=self.moment, was_found=True)
        file.is_dirty = file.is_emptied = False
        return file
