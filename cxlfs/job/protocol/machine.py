"""What a machine of the protocol is: actions out, events in, and the gathering of what ranks say.

Whoever drives one carries each action out, one after the other, and gives the event that it ended
with: ``Done`` or ``Failed``; of a ``Gather``, ``Heard`` for each message, and ``DeadlinePassed``
when it has waited long enough. It ends when ``outcome`` is there.

In a *poll* all ranks say yes or no, and each needs to know no more than whether all said yes. There
rank 0 tells the others what it has counted, a ``Tally``; who does not hear that in time, and could
hear the others, counts what they said.

Never: what is saved or restored, and when (``saving``, ``restoring``).

Invariants
- One action is under way at a time.
- A rank is heard once in each gathering: a message that comes twice, late, or for another gathering
  changes nothing.
- A gathering ends when all that are wanted were heard, or by its deadline; a poll also by a tally.
- A tally is made of what all have said, or of a no, as any rank would count it: it does not matter
  whether a rank counts or hears it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from cxlfs.job.protocol.messages import Body, Tally
from cxlfs.job.protocol.model import Attempt, Inventory, Key, Outcome, Undecided

# --- actions ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """Write this rank's shards beside the place where they count, durable, and read them back."""

    attempt: Attempt


@dataclasses.dataclass(frozen=True, slots=True)
class Replicate:
    """Bring them, with their manifest, to the stores that hold copies; durable and verified there
    when it is done.
    """

    attempt: Attempt


@dataclasses.dataclass(frozen=True, slots=True)
class WriteManifest:
    """Write the manifest of the shards and give them their place, durable. Done: its digest. From
    then on this rank has voted for the attempt, whether anybody hears of it or not.
    """

    attempt: Attempt
    world: int


@dataclasses.dataclass(frozen=True, slots=True)
class RecordCommit:
    """Make durable that all have voted, and for what."""

    attempt: Attempt
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Collect:
    """Every rank has recorded the attempt: give back what ``planning.collectable`` says."""

    attempt: Attempt


@dataclasses.dataclass(frozen=True, slots=True)
class Discard:
    """The attempt can never be committed: give its room back."""

    attempt: Attempt


@dataclasses.dataclass(frozen=True, slots=True)
class TakeStock:
    """Done: the Inventory of this rank's store."""


@dataclasses.dataclass(frozen=True, slots=True)
class TakeStockBelow:
    """Of rank 0 alone. Done: the Inventory of the tier below, which every rank can fetch from."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Verify the shards of rank ``shard`` as store ``holder`` has them against the manifest of this
    digest, and load them.
    """

    attempt: Attempt
    shard: int
    holder: str
    manifest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Tell all ranks, this one as well (unless ``body`` is None), and listen until the deadline, or
    until what was heard was enough. ``from_rank_0``: nobody else is wanted. ``is_poll``: rank 0 is
    told, the others may be, and of rank 0 a Tally is enough.
    """

    key: Key
    body: Body | None
    from_rank_0: bool = False
    is_poll: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Tell:
    """Tell all other ranks, who listen in the gathering of that key. Nobody is waited for."""

    key: Key
    body: Tally


Action: TypeAlias = (
    Save
    | Replicate
    | WriteManifest
    | RecordCommit
    | Collect
    | Discard
    | TakeStock
    | TakeStockBelow
    | Load
    | Gather
    | Tell
)

# --- events -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    action: Action
    value: str | Inventory | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    action: Action
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    key: Key
    sender: int
    body: Body


@dataclasses.dataclass(frozen=True, slots=True)
class DeadlinePassed:
    key: Key


Event: TypeAlias = Done | Failed | Heard | DeadlinePassed

# --- the machine --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many a machine is for, and in which call (see ``Key``)."""

    rank: int
    world: int
    incarnation: str
    call: int


_Ended: TypeAlias = Callable[[dict[int, Body], tuple[int, ...]], "Action | None"]
_Count: TypeAlias = Callable[[dict[int, Body], tuple[int, ...]], "Tally | None"]
_Decide: TypeAlias = Callable[[Tally], "Action | None"]


class Machine(abc.ABC):
    """``action``: what is to be done next; None when ``outcome`` is there."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.outcome: Outcome | None = None
        self.action: Action | None = None
        self._wanted: frozenset[int] = frozenset()
        self._heard: dict[int, Body] = {}
        self._ended: _Ended | None = None
        self._decide: _Decide | None = None

    def start(self) -> Action | None:
        self.action = self._begin()
        return self.action

    def on(self, event: Event) -> Action | None:
        """The next action; the same one while it goes on, None at the end."""
        action = self.action
        if isinstance(event, Heard | DeadlinePassed):
            if isinstance(action, Gather) and event.key == action.key:
                if isinstance(event, Heard) and isinstance(event.body, Tally):
                    self._hear_tally(event.sender, event.body)
                else:
                    self._listen(event)
        elif action == event.action and not isinstance(action, Gather):
            if isinstance(action, Tell):
                self._decide_by(action.body)
            else:
                self.action = self._proceed(event)
        return self.action

    def _listen(self, event: Heard | DeadlinePassed) -> None:
        if isinstance(event, Heard):
            if event.sender in self._wanted:
                self._heard.setdefault(event.sender, event.body)
            if not self._is_complete():
                return
        self._end_gathering()

    def _is_complete(self) -> bool:
        return self._wanted <= self._heard.keys()

    def _end_gathering(self) -> None:
        heard, ended = self._heard, self._ended
        missing = tuple(sorted(self._wanted - heard.keys()))
        self._wanted, self._heard, self._ended = frozenset(), {}, None
        if ended is not None:
            self.action = ended(heard, missing)

    def _gather(
        self,
        phase: str,
        body: Body | None,
        ended: _Ended,
        *,
        from_rank_0: bool = False,
        number: int = 0,
        is_poll: bool = False,
    ) -> Action:
        """``ended`` gets what was heard, and who was not; ``number`` tells gatherings of one phase
        apart.
        """
        place = self.place
        self._wanted = frozenset(range(1 if from_rank_0 else place.world))
        self._heard = {}
        self._ended = ended
        key = Key(place.incarnation, place.call, phase, number)
        return Gather(key, body, from_rank_0, is_poll)

    # --- polls ------------------------------------------------------------------------------

    def _poll(
        self, phase: str, body: Body, count: _Count, decide: _Decide, *, number: int = 0
    ) -> Action:
        """``count`` makes a tally of what was heard, or None where it cannot be known (see
        ``_uncounted``). ``decide`` gets the tally, whoever has counted.
        """
        self._decide = decide

        def ended(heard: dict[int, Body], missing: tuple[int, ...]) -> Action | None:
            return self._counted(count(heard, missing), missing)

        return self._gather(phase, body, ended, number=number, is_poll=True)

    def _counted(self, tally: Tally | None, missing: tuple[int, ...]) -> Action | None:
        poll, decide = self.action, self._decide
        if not isinstance(poll, Gather) or decide is None:
            return None
        if tally is None:
            return self._uncounted(poll.key.phase, missing)
        if self.place.rank == 0 and self.place.world > 1:
            return Tell(poll.key, tally)
        return decide(tally)

    def _uncounted(self, phase: str, missing: tuple[int, ...]) -> Action | None:
        """What was heard is not enough to know it."""
        self._finish(Undecided(phase, missing))
        return None

    def _hear_tally(self, sender: int, tally: Tally) -> None:
        """Of rank 0 alone, and of no rank that there is not."""
        is_poll = isinstance(self.action, Gather) and self.action.is_poll
        if is_poll and sender == 0 and all(rank < self.place.world for rank, _ in tally.against):
            self._wanted, self._heard, self._ended = frozenset(), {}, None
            self._decide_by(tally)

    def _decide_by(self, tally: Tally) -> None:
        if self._decide is not None:
            self.action = self._decide(tally)

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome

    @abc.abstractmethod
    def _begin(self) -> Action | None: ...

    @abc.abstractmethod
    def _proceed(self, event: Done | Failed) -> Action | None: ...
