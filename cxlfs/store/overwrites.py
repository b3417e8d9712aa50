"""Files that may be torn: what they replace is held until the new content is judged.

A file that a program truncates, writes and closes is published at its close, as any other. Whether
it is torn is known later: by its bytes, and by how its writer ends. Until then the version before
is held, on the media too. It comes back when the new content is torn and its writer is gone.

A new file replaces nothing, but it may follow another one of its series (``series``): then the name
that is highest counts. It is judged by the same rules, and loses its name when it is torn.

Other modules judge bytes (whoever asks for ``next_question``), watch processes (``ending_of``), and
publish (``versions``). This one never looks at file data, but for the head of the version before.

Invariants
- The record that publishes such an overwrite is the one that holds the version before. A crash
  finds both, or the old version alone.
- Content that is whole and has every name of the version before never goes back. Neither does
  content of a format that the judge does not know, nor a file that somebody is writing.
- Content that goes back is kept aside, as a killed writer's is: one record exchanges the two.
- A new file that is torn loses its name by one record, and history has it.
- Held versions are given up, the oldest first and with an event, before a write fails for space.
  Those of files that are being filled through a mapping are not (``shared_maps``).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from cxlfs.errors import BusyError, CxlfsError, InvariantError, NoAttributeError
from cxlfs.format import layout
from cxlfs.format.operations import (
    Operation,
    XattrRemoveOperation,
    XattrSetOperation,
)
from cxlfs.native.extents import Counting
from cxlfs.store.held import HELD_XATTR, Held
from cxlfs.store.overwrite import (
    Evidence,
    Overwrite,
    exchange_operations,
    has_its_name,
    told,
)
from cxlfs.store.paths import path_of
from cxlfs.store.series import UNJUDGED, UNJUDGED_XATTR, Series, is_unjudged
from cxlfs.store.unit_rules import Ending
from cxlfs.store.version import Version
from cxlfs.units import printable

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

log = logging.getLogger(__name__)

HEAD_BYTES = 320
"""Of the version before, from which the judge knows whether it knows the format."""
QUIET_SECONDS = 10.0
"""A program that ended well may have left its file for another one to complete, for so long."""
WEAK_SECONDS = 10.0
"""Weak evidence counts where the file was closed at most so long before its writer failed."""
REST_SECONDS = 0.25
"""A file is looked at when it was not written for so long, or its writer is gone."""
WAIT_SECONDS = 5.0
"""Readers wait for the judge for so long after the writer's end."""
_NEW_MAX = 16_384
"""New files that are not judged yet. Further ones are not."""
_SETTLED_MAX = 256
"""New files that one record says are judged."""
_RECORD_PART = 2
"""References take at most this part of the largest record: with a new content of full length all of
it still fits a journal."""


class TornMode(enum.Enum):
    """What is done about torn overwrites: nothing, report them, or bring the old version back."""

    OFF = "off"
    REPORT = "tell"
    BACK = "back"


_TORN = frozenset({Evidence.WEAK, Evidence.STRONG})
_TEXT = b".json"
"""A text that ends early may be one that another program goes on with, or reads as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What the judge is asked: the file's name, and both contents by ``read``.

    ``read``: which ("new" or "old"), offset and length to bytes, short at the end of the content.
    It raises CxlfsError when the bytes are damaged, or the question is void.
    """

    ino: int
    commit_lsn: int
    name: bytes
    new_bytes: int
    old_bytes: int
    read: Callable[[str, int, int], bytes]
    is_new: bool = False
    """The file has replaced nothing: what is old is another one of its series."""


class Overwrites:
    """One for each volume. ``judges``: whether the judge knows a file of this name, from the head
    of the version before; ``changes_as_one``: whether half of a change in place spoils a file of
    this head; ``is_exempt``: a writer whose files are never judged, as a downloader that continues
    a torn file; ``copies_files``: one whose new files are not; ``ending_of``: what became of whom a
    token stands for; ``take_away``: ends the name of a new file.
    """

    def __init__(self, volume: Volume, versions: Versions, mode: TornMode) -> None:
        self._volume = volume
        self._versions = versions
        self.mode = mode
        self._pending: dict[int, Overwrite] = {}
        """The oldest first."""
        self._unanswered = collections.OrderedDict[int, Overwrite]()
        """Of those the ones that the judge has not answered for: first what somebody waits for."""
        self._new_in: dict[int, dict[int, Overwrite]] = {}
        """Of those the new ones, by directory and inode number."""
        self._series = Series(volume.namespace, self._is_torn)
        self._settled: list[Inode] = []
        """New files that are whole, which the media do not say yet."""
        self._whole_asides: set[int] = set()
        """Files whose kept-aside content was whole when it went there. After an opening nobody
        knows: it is reported then."""
        self.judges: Callable[[bytes, bytes], bool] = lambda _name, _head: True
        self.changes_as_one: Callable[[bytes], bool] = lambda _head: False
        self.writer: Callable[[], Hashable | None] = lambda: None
        self.is_exempt: Callable[[Hashable], bool] = lambda _writer: False
        self.ending_of: Callable[[Hashable], Ending] = lambda _writer: Ending.UNKNOWN
        self.judges_new: Callable[[bytes, bytes], bool] = lambda _name, _head: True
        self.copies_files: Callable[[Hashable], bool] = lambda _writer: False
        self.take_away: Callable[[Inode], None] = lambda _inode: None
        self.name_ended: Callable[[int, bytes, int], None] = lambda _parent, _name, _ino: None
        """A new file has lost its name."""
        self.is_open: Callable[[int], bool] = lambda _ino: False
        """A file is open for writing."""
        self.unit_of: Callable[[Inode], object | None] = lambda _inode: None
        """The open checkpoint unit that a file lies in, which decides about all its files."""
        self.settle_units: Callable[[], object] = lambda: None
        self.on_question: Callable[[], None] = lambda: None
        """Somebody waits for the judge."""
        self.clock: Callable[[], float] = time.monotonic
        self._find_left()

    def _find_left(self) -> None:
        """After opening: what the media say is held. What a crash left undecided is decided."""
        for inode in self._versions.asides.values():
            held = Held.decode((inode.xattrs or {}).get(HELD_XATTR, b""))
            if held is None or inode.aside is None:
                continue
            inode.held = held
            inode.aside.count_as(Counting.KEPT)
            if not held.is_decided:
                self._add(inode, held)
        for inode in self._volume.namespace.inodes.values():
            if is_unjudged(inode) and inode.ino not in self._pending:
                self._add(inode, None)
        for overwrite in self._pending.values():
            overwrite.crashed, overwrite.ended = True, self.clock()
        if self.mode is TornMode.OFF:
            for ino in list(self._pending):
                self._forget_question(ino)

    def _add(self, inode: Inode, held: Held | None) -> Overwrite:
        place = inode.parent, inode.name, inode.uid
        added = self._pending[inode.ino] = Overwrite(inode, held, self.clock(), place)
        self._unanswered[inode.ino] = added
        if held is None:
            self._new_in.setdefault(inode.parent, {})[inode.ino] = added
        return added

    @property
    def has_any(self) -> bool:
        return bool(self._pending)

    def writers(self) -> set[Hashable]:
        """Tokens of everybody whose end decides something."""
        return {writer for overwrite in self._pending.values() for writer in overwrite.writers}

    # --- publishing -------------------------------------------------------------------------

    def to_hold(self, inode: Inode, version: Version) -> Held | None:
        """What the publication of this version holds: the committed content, which is the inode's
        second map; or None.
        """
        before = inode.committed
        if self.mode is TornMode.OFF or before is None or inode.uncommitted or inode.is_removed:
            return None
        if not (version.whole and version.atomic) or version.redirection is not None:
            return None
        if not before.size or not self._fits(before) or inode.damaged:
            return None
        overwrite = self._pending.get(inode.ino)
        if overwrite is not None and overwrite.evidence in _TORN:
            return None  # what is held is better than what is committed
        if inode.held is not None and inode.held.is_decided:
            return None
        if overwrite is None and not self._is_judged(inode, before):
            return None
        return Held(inode.committed_mtime_ns, *self._versions.past.placed(inode))

    def creating(self, inode: Inode) -> None:
        """A program has made a new file. The record that gives it its name says so."""
        if self.mode is TornMode.OFF or len(self._pending) >= _NEW_MAX:
            return
        before = self._series.before(inode)
        self._series.made(inode)
        if before is None or self.unit_of(inode) is not None:
            return
        writer = self.writer()
        if writer is not None and self.copies_files(writer):
            return
        head = self._head_of(before.content)
        if head is not None and self.judges_new(inode.name, head):
            self._volume.namespace.set_xattr(inode, UNJUDGED_XATTR, UNJUDGED)
            added = self._add(inode, None)
            added.before = before
            added.writers.update([] if writer is None else [writer])

    def wanted_as_it_is(self, inode: Inode) -> None:
        """A program wants what is written of a file so far, or goes on with it: a new one is not
        judged any more. Raises as :meth:`Volume.commit`.
        """
        if not is_unjudged(inode) or self._volume.read_only:
            return
        if not inode.uncommitted:
            ops = [XattrRemoveOperation(inode.ino, UNJUDGED_XATTR)]
            self._volume.commit(ops, durable=False)
        self._volume.namespace.remove_xattr(inode, UNJUDGED_XATTR)
        overwrite = self._pending.get(inode.ino)
        if overwrite is not None and overwrite.held is None:
            self._forget_question(inode.ino)

    def _forget_question(self, ino: int) -> Overwrite | None:
        self._unanswered.pop(ino, None)
        overwrite = self._pending.pop(ino, None)
        if overwrite is not None and overwrite.held is None:
            beside = self._new_in[overwrite.place[0]]
            del beside[ino]
            if not beside:
                del self._new_in[overwrite.place[0]]
        return overwrite

    def _is_torn(self, inode: Inode) -> bool:
        overwrite = self._pending.get(inode.ino)
        return overwrite is not None and overwrite.evidence in _TORN

    def _fits(self, content: FileMap) -> bool:
        """One record can say all of it besides another content."""
        limit = self._volume.record_bytes_max // _RECORD_PART
        return content.ref_count * layout.REF_DTYPE.itemsize <= limit

    def _is_judged(self, inode: Inode, before: FileMap) -> bool:
        head = self._head_of(before)
        return head is not None and self.judges(inode.name, head)

    def _head_of(self, content: FileMap) -> bytes | None:
        """None: it cannot be read, or the present writer continues torn files."""
        writer = self.writer()
        if writer is not None and self.is_exempt(writer):
            return None
        try:
            return bytes(content.read(0, HEAD_BYTES))
        except CxlfsError:
            return None

    def is_one_change(self, inode: Inode) -> bool:
        """A change in place of this content, from its first write to the close, is made or not."""
        if self.mode is not TornMode.BACK or inode.uncommitted or inode.is_removed:
            return False
        head = self._head_of(inode.content)
        return head is not None and self.changes_as_one(head)

    def keeps(self, inode: Inode, version: Version) -> bool:
        """What is held stays so when this version is published: the same overwrite goes on, or a
        new one begins over content that is torn. A change in place ends the wait.
        """
        goes_on = version.atomic and not (version.in_place or version.staged)
        return inode.held is not None and goes_on

    def published(self, inode: Inode, held: Held) -> None:
        """The record with :meth:`operations` is stored, and the version before is kept aside."""
        if inode.aside is not None:
            inode.aside.count_as(Counting.KEPT)
        self._versions.asides[inode.ino] = inode
        inode.held = held
        self._volume.namespace.set_xattr(inode, HELD_XATTR, held.value)
        self._forget_question(inode.ino)
        self._add(inode, held)
        self.written(inode)

    def written(self, inode: Inode) -> None:
        """Content was published over a version that is held already, or in a new file."""
        held = inode.held
        if self.mode is TornMode.OFF or (held is None and not is_unjudged(inode)):
            return
        if held is not None and held.is_decided:
            held.is_decided = False
            self._volume.namespace.set_xattr(inode, HELD_XATTR, held.value)
        overwrite = self._pending.get(inode.ino) or self._add(inode, held)
        self._unanswered[inode.ino] = overwrite
        overwrite.evidence, overwrite.closed = None, self.clock()
        overwrite.crashed, overwrite.ended = False, None
        if held is not None:
            held.reason = ""
        if (writer := self.writer()) is not None:
            overwrite.writers.add(writer)

    def forget(self, inode: Inode) -> None:
        """What was held is gone, or is something else now."""
        overwrite = self._forget_question(inode.ino)
        self._whole_asides.discard(inode.ino)
        if inode.held is None:
            return
        inode.held = None
        self._volume.namespace.remove_xattr(inode, HELD_XATTR)
        if overwrite is not None and is_unjudged(inode) and inode.links:
            again = self._add(inode, None)  # what it has now is that of a new file
            again.writers, again.crashed = overwrite.writers, overwrite.crashed

    # --- judging ----------------------------------------------------------------------------

    def next_question(self) -> Question | None:
        """The next file to look at; None: there is none yet. The ones that a reader waits for come
        first; a file that was closed just now may be saved again at once.
        """
        rested = self.clock() - REST_SECONDS
        for overwrite in list(self._unanswered.values()):
            inode = overwrite.inode
            due = overwrite.ended is not None or overwrite.closed <= rested
            if not (due and self._is_at_rest(inode)) or self._waits_for_another(overwrite):
                continue
            old = self._content_before(overwrite)
            if old is not None:
                return Question(
                    *(inode.ino, inode.commit_lsn, inode.name),
                    *(inode.content.size, old.size),
                    self._reader(overwrite, inode.commit_lsn),
                    is_new=overwrite.held is None,
                )
            if overwrite.held is None:  # there is nothing to compare it with any more
                overwrite.evidence = Evidence.NONE
                del self._unanswered[inode.ino]
        return None

    def _content_before(self, overwrite: Overwrite) -> FileMap | None:
        if overwrite.held is not None:
            return overwrite.inode.aside
        before = self._before(overwrite)
        return None if before is None or not self._is_at_rest(before) else before.live

    def _before(self, overwrite: Overwrite) -> Inode | None:
        """The file that a new one is compared with: of torn ones the one before those."""
        before = overwrite.before
        while before is not None and self._is_torn(before):
            other = self._pending[before.ino]
            before = None if other.held is not None else other.before
        if before is None or before.live is None or before.links == 0:
            before = self._series.before(overwrite.inode, after_crash=overwrite.crashed)
        overwrite.before = before
        return before

    def _waits_for_another(self, overwrite: Overwrite) -> bool:
        """What it is compared with is to be judged first."""
        before = None if overwrite.held is not None else self._before(overwrite)
        return before is not None and before.ino in self._unanswered

    def _reader(self, overwrite: Overwrite, lsn: int) -> Callable[[str, int, int], bytes]:
        def read(which: str, offset: int, length: int) -> bytes:
            inode = overwrite.inode
            # neither, once it is removed
            content = inode.live if which == "new" else self._content_before(overwrite)
            void = inode.commit_lsn != lsn or self._pending.get(inode.ino) is not overwrite
            if void or content is None or not self._is_at_rest(inode):
                raise CxlfsError("the file has changed meanwhile")
            return bytes(content.read(offset, length))

        return read

    def judged(self, question: Question, evidence: Evidence, reason: str) -> None:
        """The judge's answer. It is void where the content has changed since."""
        overwrite = self._pending.get(question.ino)
        if overwrite is None or overwrite.inode.commit_lsn != question.commit_lsn:
            return
        if not self._is_at_rest(overwrite.inode):
            return
        held = overwrite.held
        if held is None and evidence not in _TORN and self._was_left(overwrite.inode, evidence):
            evidence, reason = Evidence.STRONG, "its writer was killed before it had closed it"
        overwrite.evidence = evidence
        self._unanswered.pop(question.ino, None)
        if evidence not in _TORN:
            reason = ""
        if held is not None:
            held.reason = reason
        overwrite.reason = reason
        if reason and self._is_alive(overwrite):
            self._volume.event("torn", told("is", overwrite), ino=question.ino)

    @staticmethod
    def _was_left(inode: Inode, evidence: Evidence) -> bool:
        """By a writer that was killed: nobody knows its format, or it has holes."""
        is_known = evidence is Evidence.NONE
        has_holes = inode.content.allocated < inode.content.size
        return bool(inode.flags & layout.INODE_INCOMPLETE) and (has_holes or not is_known)

    def _is_at_rest(self, inode: Inode) -> bool:
        return inode.version is None and not self.is_open(inode.ino)

    # --- deciding ---------------------------------------------------------------------------

    def wait_for(self, ino: int, *, opens: bool) -> bool:
        """A process asks for a file (``opens``: to read it) that it does not write. True: what
        becomes of it is known soon, and the process asks again.
        """
        overwrite = self._pending.get(ino)
        if overwrite is None or self._volume.read_only or self._is_alive(overwrite):
            return False
        overwrite.wanted = overwrite.wanted or opens
        unit = self.unit_of(overwrite.inode)
        deciding = [overwrite] if unit is None else self._left_in(unit)
        for each in deciding:
            each.ended = self.clock() if each.ended is None else each.ended
            if each.inode.ino in self._unanswered:
                self._unanswered.move_to_end(each.inode.ino, last=False)
        if overwrite.inode.version is not None:
            return False  # somebody else writes it already
        # The RELEASE of its writer comes behind the writer's end.
        if any(o.evidence is None or not self._is_at_rest(o.inode) for o in deciding):
            self.on_question()
            return self.clock() - (overwrite.ended or 0.0) < WAIT_SECONDS
        if unit is not None:
            self.settle_units()
        else:
            self._try_to_decide(overwrite)
        return False

    def is_new(self, ino: int) -> bool:
        """It is a new file that may lose its name: nobody is to remember that."""
        overwrite = self._pending.get(ino)
        return overwrite is not None and overwrite.held is None

    def wait_below(self, directory: int) -> bool:
        """A process lists a directory: the same for each new file in it."""
        new = list(self._new_in.get(directory, {}).values())
        waits = {self.wait_for(overwrite.inode.ino, opens=True) for overwrite in new}
        return True in waits

    def _left_in(self, unit: object) -> list[Overwrite]:
        """What writers that are gone have overwritten in a checkpoint unit."""
        found = (o for o in self._pending.values() if self.unit_of(o.inode) is unit)
        return [overwrite for overwrite in found if not self._is_alive(overwrite)]

    def torn(self) -> Iterator[Inode]:
        """Files that are torn by their own bytes, and not decided."""
        return (o.inode for o in self._pending.values() if o.evidence is Evidence.STRONG)

    def settle(self) -> bool:
        """Decide about every file of which enough is known; True when something was."""
        if self._volume.read_only:
            return False
        worked = False
        for overwrite in list(self._pending.values()):
            worked = self._try_to_decide(overwrite) or worked
        if self._settled:
            self._store_settled()
        return worked

    def _store_settled(self) -> None:
        """One record says of new files that they are judged."""
        settled, self._settled = self._settled[:_SETTLED_MAX], self._settled[_SETTLED_MAX:]
        settled = [i for i in settled if is_unjudged(i) and i.links and i.ino not in self._pending]
        ops: list[Operation] = [XattrRemoveOperation(i.ino, UNJUDGED_XATTR) for i in settled]
        if not ops:
            return
        try:
            self._volume.commit(ops, durable=False)
        except CxlfsError as error:
            log.info("new files stay to be judged: %s", error.message)
            self._settled += settled
            return
        for inode in settled:
            self._volume.namespace.remove_xattr(inode, UNJUDGED_XATTR)

    def _try_to_decide(self, overwrite: Overwrite) -> bool:
        """What cannot be stored now is tried again: neither a reader nor other work fails for it.
        True: it was decided.
        """
        try:
            return self._decide(overwrite)
        except CxlfsError as error:
            message = f"what becomes of an overwrite cannot be stored: {error.message}"
            self._volume.event("not-published", message, ino=overwrite.inode.ino)
            return False

    def finish(self) -> None:
        """The store is about to be closed: nobody can go on with anything. What the judge has not
        seen is decided at the next opening.
        """
        for overwrite in list(self._pending.values()):
            if overwrite.evidence is not None and self._is_at_rest(overwrite.inode):
                overwrite.crashed = True
                self._try_to_decide(overwrite)
        while self._settled and not self._volume.read_only:
            before = len(self._settled)
            self._store_settled()
            if len(self._settled) >= before:
                break

    def _endings(self, overwrite: Overwrite) -> set[Ending]:
        return {self.ending_of(writer) for writer in overwrite.writers} or {Ending.UNKNOWN}

    def _is_alive(self, overwrite: Overwrite) -> bool:
        return not overwrite.crashed and Ending.ALIVE in self._endings(overwrite)

    def _decide(self, overwrite: Overwrite) -> bool:
        """True: it was. Raises as :meth:`Volume.commit`."""
        inode, evidence = overwrite.inode, overwrite.evidence
        if evidence is None or not self._is_at_rest(inode) or self.unit_of(inode) is not None:
            return False
        if evidence not in _TORN or not has_its_name(overwrite):
            self._is_whole(overwrite)
            return True
        endings = self._endings(overwrite)
        if not overwrite.crashed and Ending.ALIVE in endings:
            return False
        now = self.clock()
        if overwrite.ended is None:
            overwrite.ended = now
        failed = overwrite.crashed or bool(endings - {Ending.WELL, Ending.UNKNOWN})
        quiet = now - max(overwrite.closed, overwrite.ended) >= QUIET_SECONDS
        quiet = quiet and overwrite.held is not None  # another program may go on with a new file
        if evidence is Evidence.STRONG and not (failed or overwrite.wanted or quiet):
            return False
        is_certain = evidence is Evidence.STRONG and (failed or not inode.name.endswith(_TEXT))
        soon = overwrite.crashed or overwrite.ended - overwrite.closed <= WEAK_SECONDS
        goes_back = is_certain or (failed and soon)
        if not (goes_back and self.mode is TornMode.BACK):
            self._report(overwrite)
        elif overwrite.held is None:
            self._end_name(overwrite)
        else:
            self.back(inode, overwrite.reason)
        return True

    def _is_whole(self, overwrite: Overwrite) -> None:
        inode = overwrite.inode
        if overwrite.held is not None:
            self.release(inode)
            return
        self._forget_question(inode.ino)
        self._settled.append(inode)

    def _report(self, overwrite: Overwrite) -> None:
        """The content stays, and its state says that it is incomplete. One record."""
        inode, held = overwrite.inode, overwrite.held
        if held is not None:
            held.is_decided = True
            ops = [XattrSetOperation(inode.ino, HELD_XATTR, held.value)]
            self._volume.commit(ops, durable=False)
            self._volume.namespace.set_xattr(inode, HELD_XATTR, held.value)
        else:
            self._settled.append(inode)
        self._forget_question(inode.ino)
        self._volume.event("torn", told("was left", overwrite), ino=inode.ino)

    def _end_name(self, overwrite: Overwrite) -> None:
        """A new file that is torn loses its name. Durable when it returns. Raises as
        :meth:`Volume.commit`.
        """
        inode = overwrite.inode
        path = path_of(self._volume.namespace, inode.ino) or inode.name
        self.take_away(inode)
        self._forget_question(inode.ino)
        self._series.ended(*overwrite.place[:2])
        self.name_ended(*overwrite.place[:2], inode.ino)
        self._volume.counters.reverts += 1
        rest = "cxlfs undelete brings it back"
        message = f"{printable(os.fsdecode(path))}: {told('was left', overwrite)}; {rest}"
        self._volume.event("taken-away", message)

    def release(self, inode: Inode) -> None:
        """The present content is wanted, and what is held is not any more. One record."""
        self._versions.drop_aside(inode)

    def back(self, inode: Inode, reason: str) -> None:
        """The version before is the content again, and the torn one is kept aside. One record,
        durable when it returns. Raises as :meth:`Volume.commit`.
        """
        held = inode.held
        if held is None:
            return
        is_whole = not held.reason
        self._exchange(inode, held.mtime_ns, None)
        if is_whole:
            self._whole_asides.add(inode.ino)
        self._volume.counters.reverts += 1
        self._volume.event("reverted", f"the previous version is back: {reason}", ino=inode.ino)
        if inode.aside is not None and not self._fits(inode.aside):
            self._versions.drop_aside_map(inode)

    def restore(self, inode: Inode) -> None:
        """A user wants what is kept aside of a file; the present content is kept aside. The same
        again undoes it. Durable when it returns.

        Raises NoAttributeError (nothing is kept aside), BusyError (it is being written), and as
        :meth:`Volume.commit`.
        """
        if inode.aside is None:
            raise NoAttributeError("nothing is kept aside of this file")
        if not self._is_at_rest(inode):
            raise BusyError("the file is being written")
        if inode.held is not None:
            self.back(inode, "a user asked for it")
            return
        held = Held(inode.mtime_ns, *self._versions.past.placed(inode), is_decided=True)
        is_whole = inode.ino in self._whole_asides
        self._exchange(inode, self._volume.now(), None if is_whole else Held.decode(held.value))
        if is_whole:
            self._whole_asides.add(inode.ino)  # the other one went back by a user's wish as well
        message = "what was kept aside is the content: a user asked for it"
        self._volume.event("reverted", message, ino=inode.ino)

    def _exchange(self, inode: Inode, mtime_ns: int, held: Held | None) -> None:
        """Content and what is kept aside change places, in one record; ``held``: what is known of
        the present content then.
        """
        before, after = inode.content, inode.aside
        if after is None:
            raise InvariantError("there is nothing to exchange")
        inode.stop_writes()
        self._versions.leases.close(before)
        now = self._volume.now()
        keeps = held is not None or self._fits(before)
        ops = exchange_operations(inode, before, held, (mtime_ns, now), keeps=keeps)
        lsn, time_ns = self._volume.commit(ops)
        self._volume.note_committed(ops)
        self.forget(inode)
        self._versions.clones.forget(inode)
        self._versions.close_map(inode.committed)
        inode.committed = None
        after.count_as(Counting.KEPT)
        inode.replace_live(after)
        before.count_as(Counting.ASIDE if held is None else Counting.KEPT)
        inode.aside, inode.held = before, held
        if held is not None:
            self._volume.namespace.set_xattr(inode, HELD_XATTR, held.value)
        inode.mtime_ns, inode.ctime_ns = mtime_ns, now
        inode.commit_lsn, inode.commit_ns = lsn, time_ns

    def give_up_oldest(self) -> bool:
        """Space is wanted that nothing else has: of the oldest overwrite one of the two contents
        goes, the torn one where that is known. What a program still fills through a mapping needs
        the other one. False: there is nothing to give up. Raises as Volume.commit.
        """
        unfinished = self._versions.shared_maps.is_unfinished
        inode = next((inode for inode in self._held() if not unfinished(inode.ino)), None)
        if inode is None or inode.held is None:
            return False
        overwrite = self._pending.get(inode.ino)
        torn = overwrite is not None and overwrite.evidence is Evidence.STRONG
        if torn and self.mode is TornMode.BACK and self._is_at_rest(inode):
            self.back(inode, f"{inode.held.reason}; its space is needed")
        else:
            message = "the version before is given up: its space is needed"
            self._volume.event("given-up", message, ino=inode.ino)
        self._versions.drop_aside(inode)
        return True

    def _held(self) -> Iterator[Inode]:
        return (inode for inode in self._versions.asides.values() if inode.held is not None)
