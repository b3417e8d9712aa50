"""Histories of a job whose stores leave and return: which start resumes where, what is collected.

Starts on any stores of a pool, also beside each other; attempts that end anywhere; stores that are
destroyed, damaged, or come back as they once were; a tier; an operator who answers or does not.
The verdicts, records and collections are those of ``cxlfs.job.protocol``: nothing of the rule is
written again here. What must hold raises ``ViolationError``.

Never: messages and deadlines (``job_histories``).

Invariants
- A history is made of one seed, or of a path of events (``play``), and takes no time.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from collections.abc import Iterator, Sequence

from cxlfs.job.protocol import (
    TIER,
    Attempt,
    Commit,
    Decision,
    Held,
    Inventory,
    Kind,
    Line,
    Lineage,
    Verdict,
    collectable,
    digest_of,
    judge,
    line_after,
    next_number,
)
from tests.support.job_stores import ViolationError

DESTROYED_MAX = 3


@dataclasses.dataclass
class Disk:
    """A store, or the tier: what it holds."""

    name: str
    held: set[tuple[Attempt, int]] = dataclasses.field(default_factory=set)
    commits: set[Attempt] = dataclasses.field(default_factory=set)
    lines: dict[str, Line] = dataclasses.field(default_factory=dict)
    bad: set[tuple[Attempt, int]] = dataclasses.field(default_factory=set)
    job: str = ""

    def inventory(self, world: int, decision: Decision | None = None) -> Inventory:
        good = sorted(self.held - self.bad)
        return Inventory(
            self.name,
            tuple(Held(a, rank, world, manifest(a, rank)) for a, rank in good),
            tuple(Commit(a, digest(a, world)) for a in sorted(self.commits)),
            self.name,
            self.job or next((line.job for line in self.lines.values()), ""),
            tuple(self.lines.values()),
            tuple(sorted(self.held & self.bad)),
            decision,
        )

    def remove(self, attempt: Attempt) -> None:
        self.held = {each for each in self.held if each[0] != attempt}
        self.commits.discard(attempt)


def manifest(attempt: Attempt, rank: int) -> str:
    return f"{attempt.id}.{attempt.number}.{rank}"


def digest(attempt: Attempt, world: int) -> str:
    return digest_of([manifest(attempt, rank) for rank in range(world)])


@dataclasses.dataclass
class Running:
    """A start that saves. ``lineage``: what it knew; ``first``: its next number."""

    line: Line
    lineage: Lineage
    next: int


class World:
    """``stops``: too few stores are a question. ``late_records``, ``no_fence``: mistakes of those
    who carry verdicts out.
    """

    late_records = False
    no_fence = False

    def __init__(
        self,
        chance: random.Random,
        *,
        ranks: int,
        replicas: int,
        pool: int,
        has_tier: bool,
        keep: int,
        stops: bool,
    ) -> None:
        self.chance = chance
        self.ranks = ranks
        self.replicas = replicas
        self.keep = keep
        self.stops = stops
        self.disks = {f"s{n}": Disk(f"s{n}") for n in range(pool)}
        self.old: dict[str, Disk] = {}
        """Stores as they once were."""
        self.made = pool
        self.tier = Disk(TIER) if has_tier else None
        self.destroyed: set[str] = set()
        self.rolled_back: set[str] = set()
        self.all_lines: dict[str, Line] = {}
        self.told: set[Attempt] = set()
        self.given_up: set[Attempt] = set()
        self.running: list[Running] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.trace: list[str] = []
        self.serial = 0

    # --- what is true, whoever knows ----------------------------------------------------------

    def leads(self, older: Attempt, newer: Attempt) -> bool:
        """By the chains of parents alone, as this world has seen them begin."""
        while older.id != newer.id:
            parent = self.all_lines[newer.id].parent
            if parent is None:
                return False
            newer = parent
        return older.number <= newer.number

    def is_whole(self, attempt: Attempt, disks: Sequence[Disk]) -> bool:
        return all(
            any((attempt, rank) in disk.held - disk.bad for disk in disks)
            for rank in range(self.ranks)
        )

    def _violated(self, what: str) -> None:
        self.trace.append(f"VIOLATION: {what}")
        raise ViolationError("\n".join([what, *self.trace]))

    # --- a start ------------------------------------------------------------------------------

    def start(self, members: Sequence[str], *, answers: bool, crashes: bool = True) -> bool:
        """Whether it began. ``answers``: an operator decides what it asks."""
        disks = [self.disks[name] for name in members]
        if self.all_lines and self.tier is None and not any(disk.lines for disk in disks):
            self.counts["another job"] += 1
            return False
        heard = [*disks, *([] if self.tier is None else [self.tier])]
        jobs = {disk.inventory(self.ranks).job for disk in heard}
        if len(jobs - {""}) > 1:
            self.counts["refused: of two jobs"] += 1
            return False
        if not self.no_fence:
            self.running = [r for r in self.running if not set(r.line.members) & set(members)]
        verdict = self._judged(members)
        if self._is_question(verdict):
            self.counts["questions"] += 1
            self._judge_question(verdict, members)
            decision = self._decision(verdict) if answers else None
            if decision is None:
                return False
            verdict = self._judged(members, decision)
            if self._is_question(verdict):
                self.counts["asked again"] += 1
                return False
            self._note_given_up(decision)
        else:
            self._judge_verdict(verdict, members)
        return self._begin(verdict, members, crashes=crashes)

    def _judged(self, members: Sequence[str], decision: Decision | None = None) -> Verdict:
        own = [self.disks[name].inventory(self.ranks, decision) for name in members]
        below = None if self.tier is None else self.tier.inventory(self.ranks)
        return judge(own, can_fetch=True, below=below)

    def _is_question(self, verdict: Verdict) -> bool:
        asks = verdict.kind in {Kind.ASK, Kind.REFUSE}
        return asks or (self.stops and bool(verdict.unheard) and verdict.decision is None)

    def _decision(self, verdict: Verdict) -> Decision | None:
        """One of the heads that can be loaded, else what can be."""
        self.counts[f"question: {verdict.kind.value}, {len(verdict.heads)} heads"] += 1
        if verdict.kind is Kind.NOTHING:
            return Decision(None, ())
        if verdict.kind is Kind.RESUME:
            return Decision(verdict.heads[0], verdict.heads)
        heads = [head for head in verdict.heads if head in verdict.loadable]
        among = heads or list(verdict.loadable)
        return Decision(self.chance.choice(among), verdict.heads) if among else None

    def _note_given_up(self, decision: Decision) -> None:
        self.counts["decisions"] += 1
        resume = decision.resume
        self.given_up |= {x for x in self.told if resume is None or not self.leads(x, resume)}

    def _begin(self, verdict: Verdict, members: Sequence[str], *, crashes: bool) -> bool:
        head, ranks = verdict.head, range(self.ranks)
        own = [self.disks[name].inventory(self.ranks) for name in members]
        targets = [
            [members[(rank + n) % self.ranks] for n in range(1, self.replicas)] for rank in ranks
        ]
        self.serial += 1
        line = line_after(verdict, own, targets, [f"{self.serial}"], self.serial)
        self.all_lines[line.id] = line
        lineage = verdict.seen.lineage.joined(line)
        decided = ", decided" if verdict.decision is not None else ""
        unsure = ", provisional" if line.is_provisional else ""
        self.trace.append(f"line {line.id[:4]} on {members} from {head}{decided}{unsure}")
        self.counts["lines"] += 1
        self.counts["provisional lines"] += line.is_provisional
        if self.tier is not None and not self.tier.job:
            self.tier.job = line.job
        todo = [("shard", rank) for rank in ranks if head is not None]
        todo += [("line", rank) for rank in ranks]
        is_cut = crashes and self.chance.random() > 0.8
        cut = self.chance.randrange(len(todo) + 1) if is_cut else len(todo)
        for what, rank in todo[:cut]:
            disk = self.disks[members[rank]]
            if what == "shard" and head is not None:
                disk.lines |= verdict.seen.lineage.lines
                disk.held.add((head, rank))
                disk.bad.discard((head, rank))
            elif what == "line" and not self.late_records:
                disk.lines |= lineage.lines
                if head is not None:
                    disk.commits.add(head)
        if cut < len(todo) and not self.late_records:
            return False
        known = next_number([*own, *verdict.seen.inventories])
        self.running.append(Running(line, lineage, known))
        return True

    # --- what must hold of it -----------------------------------------------------------------

    def _judge_verdict(self, verdict: Verdict, members: Sequence[str]) -> None:
        """Nobody was asked."""
        lines = verdict.seen.lineage.lines.values()
        head, seen = verdict.head, verdict.seen.attempts
        led = verdict.seen.lineage.led_by(head) if head is not None else lines
        is_unsure = bool(verdict.unheard) or any(line.is_provisional for line in led)
        for told in sorted(self.told - self.given_up):
            if head is not None and self.leads(told, head):
                continue
            went_back = set(self.all_lines[told.id].members) & self.rolled_back
            if went_back and told not in verdict.seen.recorded:
                self.counts["a store went back"] += 1
                continue
            if any(self.leads(told, each) for each in seen):
                self._violated(f"{told} is visible, {members} resume at {head}")
            owner = [self.all_lines[told.id]]
            while owner[-1].parent is not None:
                owner.append(self.all_lines[owner[-1].parent.id])
            if any(line.is_provisional for line in owner):
                self.counts["unseen, of a provisional line"] += 1
            elif not is_unsure and lines:
                self._violated(f"{told} is unseen, {members} are sure of {head}")
            else:
                self.counts["unseen, and provisional"] += 1

    def _judge_question(self, verdict: Verdict, members: Sequence[str]) -> None:
        """Up to r - 1 stores are lost: nobody needs to be asked what to load."""
        if verdict.kind is not Kind.ASK or len(verdict.heads) != 1 or self.counts["damage"]:
            return
        (head,) = verdict.heads
        line = self.all_lines[head.id]
        heard = set(line.members) & set(members)
        is_parent = any(each.parent == head for each in verdict.seen.lineage.lines.values())
        is_late = heard & self.rolled_back or is_parent
        if not is_late and len(heard) > self.ranks - self.replicas:
            self._violated(f"{members} are asked about {head} needlessly")

    # --- an attempt ---------------------------------------------------------------------------

    def attempt(self, running: Running, plan: str = "") -> None:
        """``plan``: where it ends; empty: by chance."""
        line, members = running.line, running.line.members
        attempt = Attempt(running.next, self.serial, line.id)
        running.next += 1
        acts = self._acts(attempt, line)
        ends = {
            "full": len(acts),
            "mid": sum(act[0] in {"copy", "vote"} for act in acts) // 2 + 1,
            "voted": sum(act[0] in {"copy", "vote"} for act in acts),
            "kept": len(acts) - len(set(members)),
        }
        is_cut = self.chance.random() > 0.75
        cut = self.chance.randrange(len(acts) + 1) if is_cut else len(acts)
        cut = ends[plan if plan != "drain" else "full"] if plan else cut
        for what, rank, name in acts[:cut]:
            self._act(what, attempt, rank, name, running)
        if cut < len(acts):
            self.running.remove(running)
            self.trace.append(f"  {acts[cut][0]} of {attempt} is where line {line.id[:4]} ends")
        elif self.tier is not None and (plan == "drain" if plan else self.chance.random() < 0.4):
            self._drain(attempt, running)

    def _acts(self, attempt: Attempt, line: Line) -> list[tuple[str, int, str]]:
        del attempt
        rows = []
        for rank in range(self.ranks):
            copies = [("copy", rank, name) for name in line.targets[rank]]
            rows.append([*copies, ("vote", rank, line.members[rank])])
        votes = []
        while any(rows):
            votes.append(self.chance.choice([row for row in rows if row]).pop(0))
        names = sorted(set(line.members))
        records = [("record", 0, name) for name in names]
        self.chance.shuffle(records)
        at = len(records) if self.chance.random() < 0.8 else 1
        records.insert(at, ("told", 0, ""))
        collect = [("collect", 0, name) for name in names]
        self.chance.shuffle(collect)
        return [*votes, *records, *collect]

    def _act(self, what: str, attempt: Attempt, rank: int, name: str, running: Running) -> None:
        if what == "told":
            self.told.add(attempt)
            self.counts["commits"] += 1
            self.trace.append(f"  {attempt} is committed")
            return
        disk = self.disks.get(name)
        if disk is None:
            return
        if what in {"copy", "vote"}:
            disk.held.add((attempt, rank))
        elif what == "record":
            disk.commits.add(attempt)
            if self.late_records:
                disk.lines |= running.lineage.lines
        else:
            self._collect(disk, attempt, running.lineage)

    def _drain(self, attempt: Attempt, running: Running) -> None:
        if self.tier is None:
            return
        self.tier.held |= {(attempt, rank) for rank in range(self.ranks)}
        self.tier.commits.add(attempt)
        led = (running.line, *running.lineage.led_by(running.line.parent))
        self.tier.lines |= {line.id: line for line in led}
        self.trace.append(f"  {attempt} is drained")
        if self.chance.random() < 0.5:
            self._collect(self.tier, attempt, Lineage(self.tier.lines.values()))

    def _collect(self, disk: Disk, attempt: Attempt, lineage: Lineage) -> None:
        inventory = disk.inventory(self.ranks)
        for gone in collectable(inventory, attempt, self.keep, lineage):
            self.counts["collected"] += 1
            has_heir = any(gone != each and self.leads(gone, each) for each in self.told)
            if gone in self.told and gone not in self.given_up and not has_heir:
                self._violated(f"{gone}, without a descendant, is removed behind {attempt}")
            disk.remove(gone)

    # --- stores ---------------------------------------------------------------------------------

    def destroy(self, name: str) -> None:
        del self.disks[name]
        self.destroyed.add(name)
        self.running = [r for r in self.running if name not in r.line.members]
        self.disks[f"s{self.made}"] = Disk(f"s{self.made}")
        self.made += 1
        self.trace.append(f"{name} is destroyed")

    def remember(self, name: str) -> None:
        self.old[name] = copy.deepcopy(self.disks[name])

    def roll_back(self, name: str) -> None:
        """It is again what it was when it was remembered: an image of it was put back."""
        self.counts["stores that went back"] += 1
        self.disks[name] = copy.deepcopy(self.old[name])
        self.rolled_back.add(name)
        self.running = [r for r in self.running if name not in r.line.members]
        self.trace.append(f"{name} is what it was before")

    def damage(self, name: str) -> None:
        disk = self.disks[name]
        if disk.held:
            self.counts["damage"] += 1
            disk.bad.add(self.chance.choice(sorted(disk.held)))

    # --- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """What was committed is somewhere, and the job goes on with what is left."""
        everywhere = [*self.disks.values(), *([self.tier] if self.tier is not None else [])]
        for told in sorted(self.told - self.given_up):
            members = set(self.all_lines[told.id].members)
            gone = members & (self.destroyed | self.rolled_back)
            is_last = not any(told != each and self.leads(told, each) for each in self.told)
            is_hurt = any((told, rank) in d.bad for d in everywhere for rank in range(self.ranks))
            is_due = is_last and len(gone) < self.replicas and not is_hurt
            if is_due and not self.is_whole(told, everywhere):
                self._violated(f"{told} is nowhere whole")
        self._go_on()

    def _go_on(self) -> None:
        """All stores but some are gone for good."""
        live = sorted(self.disks)
        self.chance.shuffle(live)
        stay = live[: self.chance.randint(1, len(live))]
        for name in set(live) - set(stay):
            self.destroy(name)
        members = [*stay, *sorted(set(self.disks) - set(stay))][: self.ranks]
        disks = [self.disks[name] for name in members]
        below = [] if self.tier is None else [self.tier]
        attempts = {attempt for disk in [*disks, *below] for attempt, _ in disk.held}
        has_any = any(self.is_whole(attempt, [*disks, *below]) for attempt in attempts)
        if len(members) < self.ranks or not has_any:
            self.counts["ends with nothing to load"] += 1
            return
        for _ in range(3):
            if self.start(members, answers=True, crashes=False):
                self.counts["goes on"] += 1
                return
        if not self.counts["refused: of two jobs"]:
            self._violated(f"no progress on {members}")


def history(seed: int, *, stops: bool, kind: type[World] = World) -> World:
    """Raises ViolationError."""
    chance = random.Random(seed)
    ranks = chance.choice([2, 2, 3])
    world = kind(
        chance,
        ranks=ranks,
        replicas=chance.choice([1, 2]),
        pool=chance.randint(ranks, 5),
        has_tier=chance.random() < 0.5,
        keep=chance.choice([1, 2]),
        stops=stops,
    )
    for _ in range(chance.randint(2, 18)):
        _event(world, chance)
    world.end()
    return world


def _event(world: World, chance: random.Random) -> None:
    event, name = chance.random(), chance.choice(sorted(world.disks))
    if event < 0.35 or not world.running:
        members = chance.sample(sorted(world.disks), world.ranks)
        world.start(members, answers=chance.random() < 0.3)
    elif event < 0.91:
        world.attempt(chance.choice(world.running))
    elif event < 0.95:
        if len(world.destroyed) < DESTROYED_MAX:
            world.destroy(name)
    elif event < 0.97:
        world.remember(name)
    elif event < 0.98:
        old = sorted(world.old.keys() & world.disks.keys())
        if old:
            world.roll_back(chance.choice(old))
    elif chance.random() < 0.5:
        world.damage(name)


def lineage_histories(
    first: int, count: int, *, stops: bool, kind: type[World] = World
) -> Iterator[World]:
    """One after the other; a ViolationError names its seed."""
    for seed in range(first, first + count):
        try:
            yield history(seed, stops=stops, kind=kind)
        except ViolationError as violation:
            raise ViolationError(f"history {seed}: {violation}") from None
