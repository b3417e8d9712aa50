"""Which attempt descends from which, what a job may resume from, and what that rests on.

Each start of a job draws a *line*. An attempt belongs to the line that saved it, and "newer" means
*descends from*: within a line by number, across lines by the attempt that a line resumed from.
``docs/job.md`` states the rule and its failure table.

Other modules find the stores' contents (``files``), and choose who loads what (``planning``).

Invariants
- Pure functions of what was gathered: every rank computes the same.
- A commit is unanimous, so a store that its line requires and that never had it refutes it. Only a
  store that has the record of the line can refute: one without it is not the store it was.
- An attempt that any record names as a parent, or that is recorded as committed, is never refuted
  or closed.
- A decision names the attempts that were seen. Their later descendants are another question.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from cxlfs.job.protocol.model import TIER, Attempt, Closed, GivenUp, Inventory, Line

LINE_DIGITS = 20
_LINE = re.compile(rf"[0-9a-f]{{{LINE_DIGITS}}}", re.ASCII)


class LineageError(Exception):
    """A record of a line is missing, or stores disagree about it. Never leaves this package."""


def is_of_line(attempt: Attempt) -> bool:
    """False: saved by a version that had no lines; its id is its own."""
    return _LINE.fullmatch(attempt.id) is not None


def line_id(nonces: Iterable[str], content: str) -> str:
    """The id of a line to which every rank contributed a nonce."""
    text = "\n".join((*nonces, content))
    return hashlib.sha256(text.encode()).hexdigest()[:LINE_DIGITS]


class Lineage:
    """The order of attempts, from the records of lines."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.lines: dict[str, Line] = {}
        for line in lines:
            if self.lines.setdefault(line.id, line) != line:
                raise LineageError(f"stores disagree about line {line.id}")
        self._chains: dict[str, tuple[Mapping[str, int], str]] = {}
        self.parents = frozenset(
            line.parent for line in self.lines.values() if line.parent is not None
        )
        self._closed: dict[str, int] = {}
        for closed in (each for line in self.lines.values() for each in line.closes):
            self._closed[closed.line] = min(closed.number, self._closed.get(closed.line, 1 << 63))

    def joined(self, line: Line) -> Lineage:
        return Lineage([*self.lines.values(), line])

    def chain(self, line: str) -> Mapping[str, int]:
        """The number up to which attempts of each line lead to this one.

        Raises LineageError: a record is missing.
        """
        chain, end = self._walked(line)
        if end:
            raise LineageError(f"no store that was heard has the record of line {end}")
        return chain

    def _walked(self, line: str) -> tuple[Mapping[str, int], str]:
        """And where the records end too early."""
        found = self._chains.get(line)
        if found is not None:
            return found
        chain: dict[str, int] = {}
        name, end = line, ""
        while (record := self.lines.get(name)) is not None and record.parent is not None:
            parent = record.parent
            if parent.id in chain or parent.id == line:
                raise LineageError(f"line {line} descends from itself")
            chain[parent.id] = parent.number
            if not is_of_line(parent):
                break
            name = parent.id
        else:
            end = name if record is None else ""
        self._chains[line] = chain, end
        return chain, end

    def leads_to(self, older: Attempt, newer: Attempt) -> bool:
        """True if ``newer`` is ``older``, or descends from it as far as the records go."""
        if older.id == newer.id:
            return older.number <= newer.number
        if not is_of_line(newer):
            return False
        end = self._walked(newer.id)[0].get(older.id)
        return end is not None and older.number <= end

    # --- what counts no more ----------------------------------------------------------------

    def is_closed(self, attempt: Attempt) -> bool:
        """True if a line saw that it is no commit that counts."""
        end = self._closed.get(attempt.id)
        return end is not None and end < attempt.number and attempt not in self.parents

    def is_closed_by(self, attempt: Attempt, newer: Attempt) -> bool:
        """True if one of the lines that led to ``newer`` saw that."""
        return attempt not in self.parents and any(
            closed.line == attempt.id and closed.number < attempt.number
            for line in self.led_by(newer)
            for closed in line.closes
        )

    def is_given_up(self, attempt: Attempt) -> bool:
        """True if an operator decided against it, and no later decision for it knew that one."""
        return any(
            self._gives_up(line, attempt) and not self._is_overruled(line, attempt)
            for line in self.lines.values()
        )

    def _gives_up(self, line: Line, attempt: Attempt) -> bool:
        return any(
            self.leads_to(attempt, given.attempt) and not self.leads_to(attempt, given.instead)
            for given in line.gives_up
        )

    def _is_overruled(self, line: Line, attempt: Attempt) -> bool:
        return any(
            other.parent is not None
            and self.leads_to(attempt, other.parent)
            and line.id in self.known_to(other.parent) | set(other.known)
            for other in self.lines.values()
        )

    def known_to(self, attempt: Attempt | None) -> frozenset[str]:
        """The lines that those which led to it knew, and themselves."""
        return frozenset(name for line in self.led_by(attempt) for name in (line.id, *line.known))

    def led_by(self, attempt: Attempt | None) -> tuple[Line, ...]:
        """The records of the lines that led to an attempt, its own among them."""
        if attempt is None or not is_of_line(attempt):
            return ()
        names = (attempt.id, *self._walked(attempt.id)[0])
        return tuple(self.lines[name] for name in names if name in self.lines)

    # --- collecting -------------------------------------------------------------------------

    def is_behind(self, attempt: Attempt, committed: Attempt, *, is_recorded: bool) -> bool:
        """True if ``attempt`` may go once ``committed`` is recorded in all stores of its line.
        ``is_recorded``: as a commit. Then it is not closed, whatever a line has seen.
        """
        if attempt == committed:
            return False
        if self.leads_to(attempt, committed) or self.is_given_up(attempt):
            return True
        is_commit = is_recorded and is_of_line(attempt)
        return not is_commit and self.is_closed_by(attempt, committed)


class Seen:
    """What a start has heard, of the stores of its ranks and of the tier. Raises LineageError.

    ``attempts``: of which anything is visible, whole or not; ``recorded``: as committed;
    ``heard``: stores, by name, of which the tier is none.
    """

    def __init__(self, inventories: Iterable[Inventory]) -> None:
        stores = tuple({inventory.store: inventory for inventory in inventories}.values())
        self.inventories = stores
        self.lineage = Lineage(line for inventory in stores for line in inventory.lines)
        torn = {name for i in stores for name in i.torn} - self.lineage.lines.keys()
        if torn:
            raise LineageError(f"the record of line {min(torn)} is damaged in all stores heard")
        self.heard = {i.store: i for i in stores if i.store != TIER}
        self.recorded = frozenset(c.attempt for i in stores for c in i.commits)
        visible = set(self.lineage.parents) | self.recorded
        for inventory in stores:
            visible |= {held.attempt for held in inventory.held}
            visible |= {attempt for attempt, _ in inventory.damaged}
        self.attempts = frozenset(visible)
        self._lines = {s: frozenset(line.id for line in i.lines) for s, i in self.heard.items()}
        self._possessions = {
            store: frozenset({*((h.attempt, h.rank) for h in i.held), *i.damaged})
            for store, i in self.heard.items()
        }

    def has_record(self, store: str, line: Line) -> bool:
        """True if the store was heard, and has the record of the line."""
        return line.id in self._lines.get(store, ())

    # --- heads ------------------------------------------------------------------------------

    def heads(self) -> tuple[Attempt, ...]:
        """The attempts that may be the newest commit, and have no descendant. None: there is none.

        Raises LineageError.
        """
        lineage, visible = self.lineage, self.attempts
        new = {attempt for attempt in visible if is_of_line(attempt)}
        for attempt in new:
            lineage.chain(attempt.id)  # its record is there
        firm = self.recorded | lineage.parents
        left = {
            attempt
            for attempt in new
            if attempt in firm or not (lineage.is_closed(attempt) or self._is_refuted(attempt))
        }
        left |= self._legacy_heads(visible - new)
        wanted = {attempt for attempt in left if not lineage.is_given_up(attempt)}
        found = self._maxima(wanted) or self._maxima(left)  # decisions that contradict each other
        return tuple(sorted(found))

    def _maxima(self, attempts: Collection[Attempt]) -> set[Attempt]:
        leads = self.lineage.leads_to
        return {x for x in attempts if not any(x != y and leads(x, y) for y in attempts)}

    def _is_refuted(self, attempt: Attempt) -> bool:
        line = self.lineage.lines[attempt.id]
        return any(
            self.has_record(store, line) and (attempt, rank) not in self._possessions[store]
            for rank, member in enumerate(line.members)
            for store in (member, *line.targets[rank])
        )

    def _legacy_heads(self, attempts: frozenset[Attempt]) -> set[Attempt]:
        """Of attempts that no line has listed. They are in the order of their numbers; two of one
        number are two histories.
        """
        lineage = self.lineage
        parents = set(lineage.parents & attempts)
        unlisted = {a for a in attempts - parents if not lineage.is_closed(a)}
        if not lineage.lines:
            unlisted = {a for a in unlisted if a in self.recorded or self._has_all_votes(a)}
        newest = max((a.number for a in unlisted), default=0)
        return parents | {a for a in unlisted if a.number == newest}

    def _has_all_votes(self, attempt: Attempt) -> bool:
        held = {(h.rank, h.world) for i in self.inventories for h in i.held if h.attempt == attempt}
        worlds = {world for _, world in held}
        return any({(rank, world) for rank in range(world)} <= held for world in worlds if world)

    # --- what it rests on -------------------------------------------------------------------

    def unheard(self, head: Attempt | None) -> tuple[str, ...]:
        """The stores that may have commits of which none was heard. None: a majority was heard of
        the head's line, and of each known line that is neither on its chain nor settled by it.
        """
        lines = self.lineage.lines
        needed = set(lines)
        if head is not None and is_of_line(head):
            chain = {head.id, *self.lineage.chain(head.id)}
            needed -= chain
            for name in chain & lines.keys():
                needed -= set(lines[name].settled)
            needed.add(head.id)
        heard, missing = self.heard, set[str]()
        for name in needed:
            members = set(lines[name].members)
            if 2 * len(members & heard.keys()) <= len(members):
                missing |= members - heard.keys()
        return tuple(sorted(missing))

    def closes(self, head: Attempt | None) -> tuple[Closed, ...]:
        """How far each line that was heard leads to the head: behind that it committed nothing.
        What the lines that led to the head have said is not repeated.
        """
        lineage = self.lineage
        chain: Mapping[str, int] = {}
        if head is not None:
            chain = lineage.chain(head.id) if is_of_line(head) else {}
            chain = {**chain, head.id: head.number}
        names = {
            name
            for name, line in lineage.lines.items()
            if any(self.has_record(store, line) for store in line.members)
        }
        names |= {attempt.id for attempt in self.attempts if not is_of_line(attempt)}
        said = {each for line in lineage.led_by(head) for each in line.closes}
        found = (Closed(name, chain.get(name, 0)) for name in sorted(names))
        return tuple(each for each in found if each not in said)

    def gives_up(self, instead: Attempt) -> tuple[GivenUp, ...]:
        """What a decision for ``instead`` is against: all that was seen and does not lead to it."""
        leads = self.lineage.leads_to
        return tuple(GivenUp(a, instead) for a in sorted(self.attempts) if not leads(a, instead))


def next_number(inventories: Sequence[Inventory]) -> int:
    """Larger than that of every attempt that any of the stores knows."""
    numbers = [held.attempt.number for inventory in inventories for held in inventory.held]
    numbers += [commit.attempt.number for inventory in inventories for commit in inventory.commits]
    numbers += [attempt.number for inventory in inventories for attempt, _ in inventory.damaged]
    for line in (line for inventory in inventories for line in inventory.lines):
        numbers += [line.parent.number] if line.parent is not None else []
        numbers += [closed.number for closed in line.closes]
    return max(numbers, default=0) + 1
