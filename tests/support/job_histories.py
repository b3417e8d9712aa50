"""Histories of a job of 2 to 7 ranks under the protocol of ``cxlfs.job``, in one group or in small
ones: messages are lost, late and doubled, ranks die before and behind each action, stores are lost
and damaged, ranks change places or share a store, steps are done again. What must hold whatever
happens raises ``ViolationError``.

A history is made of one seed. Nothing in it takes time: a deadline may pass at any moment, and does
when nothing else can happen.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

from cxlfs.job.protocol import (
    Aborted,
    Asked,
    Attempt,
    BeginLine,
    Body,
    Collect,
    Committed,
    DeadlinePassed,
    Decision,
    Discard,
    Done,
    Failed,
    Gather,
    Heard,
    Held,
    Key,
    Lineage,
    Load,
    Machine,
    Nothing,
    NotRestored,
    Outcome,
    Place,
    RecordCommit,
    Replicate,
    Restored,
    Restoring,
    Save,
    Saving,
    TakeStock,
    Tell,
    Undecided,
    WriteManifest,
    collectable,
    next_number,
)
from tests.support.job_stores import (
    QUIET,
    Copy,
    Fates,
    Faults,
    Rank,
    Store,
    ViolationError,
    committed_now,
    fill,
    judge_kept,
    judge_verdicts,
    placed,
    run_each,
    some_faults,
)

TURNS_MAX = 4000
"""Of one start of all processes; most take some 100."""


class History(Fates):
    """``run`` raises ViolationError. ``counts``: what was met, so that tests know they see it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.group_size = choose([0, 0, 0, 1, 2, 2, 3])
        """Of ranks; 0: no groups."""
        self.world = choose([4, 4, 5, 6, 7] if self.group_size else [2, 2, 3, 3, 4, 5])
        self.replicas = choose([1, 1, min(2, self.world), min(3, self.world)])
        self.keep = choose([1, 1, 2])
        self.polls_reach_all = self.random.random() < 0.5
        """Else those alone hear what is said in a poll to whom it is told."""
        volatile = self.random.random() < 0.05
        self.made = choose([self.world, self.random.randint(self.replicas, self.world)])
        self.stores = [
            Store(f"store{i}", is_volatile=volatile and i == 0) for i in range(self.made)
        ]
        self.seats = [rank % self.made for rank in range(self.world)]
        """Which store each rank has; some share one."""
        self.incarnation = 0
        self.flying: list[tuple[int, Key, int, Body]] = []
        """(to, key, from, body), of all incarnations: a late message may come to the next."""
        self.late: list[tuple[int, Key, int, Body]] = []
        self.ranks: list[Rank] = []
        self.failing = -1
        """The rank that cannot save."""
        self.faults = QUIET
        self.saves_wanted = 0
        self.voted: dict[tuple[Attempt, int], set[str]] = {}
        self.committed: dict[Attempt, set[int]] = {}
        """Attempts that somebody was told are committed, with the stores lost since they began."""
        self.begun: dict[Attempt, set[int]] = {}
        self.recorded: dict[Attempt, set[int]] = {}
        """The stores, by seat, in which they are recorded."""
        self.recorded_lines: dict[str, set[int]] = {}
        """The same of lines."""
        self.given_up: set[Attempt] = set()
        """Attempts that an operator has decided against."""
        self.excused: set[int] = set()
        """Stores from which a load failed in this incarnation."""
        self.has_failed_to_load = False
        self.asked: Asked | None = None
        """What the last start has asked an operator."""
        self.counts: dict[str, int] = {}

    # --- the whole --------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            self._between()
            if self.random.random() < 0.25:
                self._incarnate(QUIET, self.random.randint(0, 2))
            else:
                self._incarnate(some_faults(self.random), self.random.randint(0, 3))
        self._between()
        self._end_quietly()

    def _between(self) -> None:
        """All processes are gone: stores may be, too, and ranks come back elsewhere."""
        for index, store in enumerate(self.stores):
            if store.is_volatile or self.random.random() < 0.04:
                self._lose(index)
            elif store.copies and self.random.random() < 0.05:
                self.random.choice(list(store.copies.values())).is_damaged = True
                self._count("damaged copies")
                self._note_loss(index)
        if self.random.random() < 0.5:
            self.random.shuffle(self.seats)
        if self.asked is not None and self.random.random() < 0.8:
            self._decide(self.asked)

    def _decide(self, asked: Asked) -> None:
        """An operator answers; what was committed and does not lead there is given up."""
        if not asked.loadable:
            self._lose_all()
            return
        resume = self.random.choice(asked.loadable)
        self._count("decisions")
        self.stores[self.seats[0]].decision = Decision(resume, asked.heads)
        self.given_up |= {attempt for attempt in self.begun if attempt > resume}
        self.committed = {
            attempt: lost
            for attempt, lost in self.committed.items()
            if attempt not in self.given_up
        }

    def _lose_all(self) -> None:
        """Nothing can be loaded: the operator begins anew, in empty directories."""
        self._count("begun anew by an operator")
        for index in range(len(self.stores)):
            self._lose(index)
        self.committed.clear()

    def _lose(self, index: int) -> None:
        self._count("lost stores")
        self.stores[index] = Store(f"store{self.made}", is_volatile=self.stores[index].is_volatile)
        self.made += 1
        self._note_loss(index)

    def _note_loss(self, index: int) -> None:
        for lost in self.begun.values():
            lost.add(index)

    def _end_quietly(self) -> None:
        """Without faults all ranks save and come back to it; with one that cannot, none does."""
        due = [attempt for attempt, lost in self.committed.items() if len(lost) < self.replicas]
        outcomes = self._incarnate(QUIET, 2)
        first = [row[0] for row in outcomes]
        if any(isinstance(outcome, Undecided) for outcome in first):
            raise ViolationError(f"undecided though nothing was lost: {first}")
        if any(isinstance(outcome, NotRestored | Asked) for outcome in first):
            if due:
                raise ViolationError(f"not restored: {due}, {first}")
        elif any(store.is_volatile for store in self.stores):
            self._want(outcomes, Aborted)
        else:
            self._want(outcomes, Committed)
            judge_kept(self.stores, self.keep)
            self._fail_quietly(outcomes[0][2])

    def _want(self, outcomes: list[list[Outcome]], kind: type[Outcome]) -> None:
        for row in outcomes:
            for saved in row[1:]:
                if not isinstance(saved, kind):
                    raise ViolationError(f"saved without faults: {row}")
                if isinstance(saved, Committed) and not saved.is_cleaned:
                    raise ViolationError(f"not cleaned without faults: {row}")

    def _fail_quietly(self, last: Outcome) -> None:
        """One rank cannot save: all hear of it, and all come back to the step before."""
        self.failing = self.random.randrange(self.world)
        for row in self._incarnate(QUIET, 1):
            if not isinstance(row[0], Restored) or not isinstance(last, Committed):
                raise ViolationError(f"{last} was saved, {row[0]} restored")
            if row[0].attempt != last.attempt:
                raise ViolationError(f"{last} was saved, {row[0]} restored")
            if row[1] != Aborted(last.attempt.step + 1, ((self.failing, "it cannot"),)):
                raise ViolationError(f"rank {self.failing} could not save: {row[1]}")

    # --- one incarnation --------------------------------------------------------------------

    def _incarnate(self, faults: Faults, saves: int) -> list[list[Outcome]]:
        self.incarnation += 1
        self.faults = faults
        self.saves_wanted = saves
        self.excused = set()
        self.has_failed_to_load = False
        self.asked = None
        self.ranks = [Rank(number) for number in range(self.world)]
        for rank in self.ranks:
            self._begin_restore(rank)
        for _ in range(TURNS_MAX):
            if not self._turn():
                break
        else:
            raise ViolationError("it does not end")
        outcomes = [rank.outcomes for rank in self.ranks]
        self._judge(outcomes)
        return outcomes

    def _turn(self) -> bool:
        """Something happens; False: nothing can any more."""
        acting, waiting = [], []
        for rank in self.ranks:
            if rank.machine is not None:
                gathers = isinstance(rank.machine.action, Gather)
                (waiting if gathers else acting).append(rank)
        if not acting and not waiting:
            return False
        if self.late and self.random.random() < 0.02:
            self.flying.append(self.late.pop(self.random.randrange(len(self.late))))
        if waiting and self._strikes("early_deadline"):
            self._pass_deadline(self.random.choice(waiting))
            return True
        choices = len(acting) + len(self.flying)
        if not choices:
            self._pass_deadline(self.random.choice(waiting))
            return True
        number = self.random.randrange(choices)
        if number < len(acting):
            self._act(acting[number])
        else:
            self._deliver(number - len(acting))
        return True

    def _pass_deadline(self, rank: Rank) -> None:
        machine = rank.machine
        if machine is not None and isinstance(machine.action, Gather):
            self._count("deadlines")
            machine.on(DeadlinePassed(machine.action.key))
            self._after(rank)

    def _deliver(self, index: int) -> None:
        to, key, sender, body = self.flying[index]
        if self._strikes("doubled"):
            self._count("doubled messages")
        else:
            self.flying[index] = self.flying[-1]
            self.flying.pop()
        rank = self.ranks[to]
        if rank.machine is None:
            return
        if key.incarnation != str(self.incarnation):
            self._count("messages of a former incarnation")
        heard = Heard(key, sender, body)
        rank.mailbox.setdefault(key, []).append(heard)
        if isinstance(rank.machine.action, Gather):
            rank.machine.on(heard)
            self._after(rank)

    # --- what a rank does -------------------------------------------------------------------

    def _place(self, rank: Rank) -> Place:
        rank.call += 1
        return Place(rank.number, self.world, str(self.incarnation), rank.call, self.group_size)

    def _begin_restore(self, rank: Rank) -> None:
        self._start(rank, Restoring(self._place(rank), can_fetch=True, **self._how(rank)))

    def _how(self, rank: Rank) -> dict[str, Any]:
        nonce = f"{self.incarnation}.{rank.number}"
        return {"nonce": nonce, "began": self.incarnation, "replicas": self.replicas}

    def _begin_save(self, rank: Rank) -> None:
        rank.step += 1
        attempt = Attempt(rank.first_number + rank.saves, rank.step, rank.line)
        rank.saves += 1
        refusal = "volatile" if self.stores[self.seats[rank.number]].is_volatile else ""
        how = {"replicas": self.replicas, "recorders": frozenset(map(self.seats.index, self.seats))}
        self._start(rank, Saving(self._place(rank), attempt, refusal=refusal, **how))

    def _start(self, rank: Rank, machine: Machine) -> None:
        rank.machine = machine
        machine.start()
        self._after(rank)

    def _after(self, rank: Rank) -> None:
        """A gathering that has begun tells all; a call that has ended is followed by the next."""
        while rank.machine is not None:
            machine, action = rank.machine, rank.machine.action
            if action is None:
                self._ended(rank, machine)
            elif isinstance(action, Gather) and action is not rank.told:
                rank.told = action
                self._tell(rank, machine, action)
            else:
                return

    def _tell(self, rank: Rank, machine: Machine, action: Gather) -> None:
        """The others, and itself; then it listens to what came before it asked."""
        if action.body is not None:
            self._send_to(rank, action.to, action.key, action.body)
            own = Heard(action.key, rank.number, action.body)
            rank.mailbox.setdefault(action.key, []).append(own)
        for message in rank.mailbox.get(action.key, ()):
            if machine.action is action:
                machine.on(message)

    def _send_to(self, rank: Rank, to: Sequence[int] | None, key: Key, body: Body) -> None:
        for other in self.ranks:
            is_told = to is None or self.polls_reach_all or other.number in to
            if is_told and other is not rank:
                self._send((other.number, key, rank.number, body))

    def _send(self, message: tuple[int, Key, int, Body]) -> None:
        fate = self._fate_of_message()
        if fate == "lost":
            self._count("lost messages")
        elif fate == "late":
            self._count("late messages")
            self.late.append(message)
        else:
            self.flying.append(message)

    def _ended(self, rank: Rank, machine: Machine) -> None:
        if (outcome := machine.outcome) is None:
            raise ViolationError("a machine ended without an outcome")
        rank.outcomes.append(outcome)
        self._count(type(outcome).__name__)
        rank.machine = None
        if isinstance(outcome, Asked):
            self.asked = outcome
        if isinstance(outcome, Undecided | NotRestored | Asked):
            return
        if isinstance(machine, Restoring):
            self._restored(rank, machine, outcome)
        elif isinstance(outcome, Committed):
            known = self.begun.get(outcome.attempt)
            if known is None:
                raise ViolationError(f"{outcome.attempt} was never begun")
            self.committed[outcome.attempt] = known
        if rank.saves < self.saves_wanted:
            self._begin_save(rank)

    def _restored(self, rank: Rank, machine: Restoring, outcome: Outcome) -> None:
        rank.first_number = next_number(machine.everywhere)
        if machine.line is None:
            raise ViolationError(f"it begins without a line: {outcome}")
        rank.line, rank.lineage = machine.line.id, machine.lineage
        if isinstance(outcome, Restored):
            rank.step = outcome.attempt.step
            seated = [self.stores[seat] for seat in self.seats]
            for _ in fill(seated, self.replicas, machine, self.random):
                self._count("copies made again")
        elif any(store.commits for store in self.stores):
            raise ViolationError("it begins anew, though something was committed")
        if not self.recorded_lines.get(machine.line.id, set()) >= set(self.seats):
            raise ViolationError(f"not all stores have had the record of {machine.line.id}")

    # --- actions ----------------------------------------------------------------------------

    def _act(self, rank: Rank) -> None:
        if (machine := rank.machine) is None or (action := machine.action) is None:
            return
        fate = self._fate_of_action()
        if fate == "dies before":
            self._die(rank)
            return
        if fate == "fails":
            self._count("failed actions")
            if self.random.random() < 0.5:
                self._effect(rank, action)  # done, and nobody knows
            if isinstance(action, Load):
                names = [store.name for store in self.stores]
                self.excused |= {i for i, name in enumerate(names) if name == action.holder}
                self.has_failed_to_load = True
            machine.on(Failed(action, "failed"))
        else:
            event = self._effect(rank, action)
            if fate == "dies behind":
                self._die(rank)
                return
            machine.on(event)
        self._after(rank)

    def _die(self, rank: Rank) -> None:
        self._count("deaths")
        rank.machine = None
        if self._strikes("store_lost"):
            self._lose_node(self.seats[rank.number])

    def _lose_node(self, seat: int) -> None:
        """The store, and all ranks there."""
        self._lose(seat)
        for other in self.ranks:
            if self.seats[other.number] == seat:
                other.machine = None

    def _effect(self, rank: Rank, action: object) -> Done | Failed:
        if isinstance(action, BeginLine):
            return self._begin_line(rank, action)
        if not isinstance(action, Tell):
            return self._do(rank, action)
        self._count(f"{type(action.body).__name__} told")
        self._send_to(rank, action.to, action.key, action.body)
        return Done(action)

    def _begin_line(self, rank: Rank, action: BeginLine) -> Done | Failed:
        seat, machine = self.seats[rank.number], rank.machine
        store = self.stores[seat]
        if isinstance(machine, Restoring):
            store.lines |= machine.lineage.lines
        store.owner, store.decision = action.line.id, None
        self.recorded_lines.setdefault(action.line.id, set()).add(seat)
        if action.choice is not None:
            store.commits[action.choice.attempt] = action.choice.digest
            self.recorded.setdefault(action.choice.attempt, set()).add(seat)
        return Done(action)

    def _do(self, rank: Rank, action: object) -> Done | Failed:
        store, number = self.stores[self.seats[rank.number]], rank.number
        match action:
            case Save(attempt):
                self.begun.setdefault(attempt, set())
                if number == self.failing:
                    return Failed(action, "it cannot")
                content = f"content {attempt.id} {number} {self.incarnation}.{rank.call}"
                store.staged[attempt, number] = content
                return Done(action)
            case Replicate(attempt):
                return self._replicate(rank, action)
            case WriteManifest(attempt, _):
                return self._vote(store, number, action)
            case RecordCommit(attempt, digest):
                store.commits[attempt] = digest
                self.recorded.setdefault(attempt, set()).add(self.seats[number])
                return Done(action)
            case Collect(attempt):
                self._collect(store, attempt, rank.lineage)
                return Done(action)
            case Discard(attempt):
                store.staged.pop((attempt, number), None)
                store.copies.pop((attempt, number), None)
                return Done(action)
            case TakeStock():
                return Done(action, store.inventory())
            case Load():
                return self._load(rank, action)
        raise ViolationError(f"an action that is not known: {action}")

    def _vote(self, store: Store, number: int, action: WriteManifest) -> Done | Failed:
        attempt = action.attempt
        if store.owner != attempt.id:
            return Failed(action, "another line owns the store")
        content = store.staged.pop((attempt, number), "nothing")
        held = self._held(attempt, number, content)
        store.copies[attempt, number] = Copy(held, content)
        return Done(action, held.manifest)

    def _held(self, attempt: Attempt, number: int, content: str) -> Held:
        self.voted.setdefault((attempt, number), set()).add(content)
        return Held(attempt, number, self.world, f"manifest of {content}")

    def _replicate(self, rank: Rank, action: Replicate) -> Done | Failed:
        number, attempt = rank.number, action.attempt
        content = self.stores[self.seats[number]].staged.get((attempt, number), "nothing")
        seated = [self.stores[seat] for seat in self.seats]
        for target_rank in placed(seated, self.replicas).targets[number]:
            other = self.ranks[target_rank]
            if other.machine is None:
                return Failed(action, f"rank {other.number} is gone")
            if self._strikes("failed"):
                return Failed(action, "a copy failed")
            held = self._held(attempt, number, content)
            target = self.stores[self.seats[other.number]]
            target.copies[attempt, number] = Copy(held, content)
        return Done(action)

    def _collect(self, store: Store, attempt: Attempt, lineage: Lineage) -> None:
        gone = collectable(store.inventory(), attempt, self.keep, lineage)
        if gone:
            self._count("collections")
        if not self.recorded.get(attempt, set()) >= set(self.seats):
            raise ViolationError(f"{store.name} collects, and {attempt} is not recorded in all")
        for old in gone:
            store.remove(old)
            if self._strikes("died", 0.5):
                break

    def _load(self, rank: Rank, action: Load) -> Done | Failed:
        for store in self.stores:
            copy = store.copies.get((action.attempt, action.shard))
            if store.name != action.holder or copy is None:
                continue
            if copy.is_damaged or copy.held.manifest != action.manifest:
                return Failed(action, "damaged")
            if copy.content not in self.voted.get((copy.held.attempt, action.shard), set()):
                raise ViolationError(f"{copy.content} was never voted for")
            rank.loaded = copy.content
            own = self.stores[self.seats[rank.number]]
            if isinstance(rank.machine, Restoring):
                own.lines |= rank.machine.lineage.lines
            if own is not store:
                self._count("shards fetched")
                own.copies[action.attempt, action.shard] = dataclasses.replace(copy)
            return Done(action)
        return Failed(action, "not there")

    # --- what must hold ---------------------------------------------------------------------

    def _judge(self, outcomes: list[list[Outcome]]) -> None:
        first = [row[0] for row in outcomes if row]
        restored = {(o.attempt, o.digest) for o in first if isinstance(o, Restored)}
        if len(restored) > 1 or (restored and any(isinstance(o, Nothing) for o in first)):
            raise ViolationError(f"ranks resume differently: {first}")
        tries = set()
        for rank in self.ranks:
            outcome = rank.outcomes[0] if rank.outcomes else None
            if isinstance(outcome, Restored):
                if not rank.loaded.startswith(f"content {outcome.attempt.id} {rank.number} "):
                    raise ViolationError(f"rank {rank.number}: {outcome} with {rank.loaded!r}")
                tries.add(rank.loaded.split()[-1])
            if isinstance(outcome, Restored | Nothing):
                self._judge_not_back(outcome)
        if len(tries) > 1:
            raise ViolationError(f"two tries are mixed: {tries}")
        judge_verdicts(outcomes)

    def _judge_not_back(self, outcome: Restored | Nothing) -> None:
        number = outcome.attempt.number if isinstance(outcome, Restored) else 0
        for attempt, lost in self.committed.items():
            if committed_now(self.ranks, attempt):
                continue
            if attempt.number > number and len(lost | self.excused) < self.replicas:
                raise ViolationError(f"{attempt} was committed, {outcome} resumed")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def histories(first: int, count: int) -> Iterator[tuple[int, History]]:
    """One after the other, each run; a ViolationError names its seed."""
    return run_each(History, first, count)
