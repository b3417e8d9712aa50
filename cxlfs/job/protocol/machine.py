"""What a machine of the protocol is: actions out, events in, and the gathering of what ranks say.

Whoever drives one carries each action out, one after the other, and gives the event that it ended
with: ``Done`` or ``Failed``; of a ``Gather``, ``Heard`` for each message, and ``DeadlinePassed``
when it has waited long enough. It ends when ``outcome`` is there.

In a *poll* all ranks say yes or no, and each needs to know no more than whether all said yes. Who
leads a group (see ``place``) hears that, and tells rank 0 what it has counted, a ``Part``; rank 0
counts the groups, and tells the leaders, who tell the others, a ``Tally``. Who does not hear that
in time, and could hear those who were to be counted, counts them itself.

Never: what is saved or restored, and when (``saving``, ``restoring``).

Invariants
- One action is under way at a time.
- A rank is heard once in each gathering: a message that comes twice, late, or for another gathering
  changes nothing.
- A gathering ends when all that are wanted were heard, or by its deadline; a poll also by a tally.
- A tally is made of what all have said, or of a no, as any rank would count it: it does not matter
  whether a rank counts or hears it. So is a part, of its group.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from cxlfs.job.protocol.messages import Body, Part, Prepare, Tally
from cxlfs.job.protocol.model import Attempt, Inventory, Key, Line, Outcome, Undecided
from cxlfs.job.protocol.place import Place
from cxlfs.job.protocol.planning import Choice

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
    """Make durable in this rank's store that all have voted, and for what."""

    attempt: Attempt
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Collect:
    """The attempt is recorded in every store: give back what ``planning.collectable`` says."""

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
class BeginLine:
    """Make durable in this rank's store: the record of the line that begins, those of the lines
    before it, that it owns the store from now on, and that all have voted for what it resumes from
    (``choice``; None: a first start).
    """

    line: Line
    choice: Choice | None


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Tell ``to`` (None: all ranks; in a poll others may hear it, too), unless ``body`` is None,
    and listen until all that are ``wanted`` were heard, this rank itself perhaps among them, or the
    deadline has passed. ``above``: a Tally of that rank, or of rank 0, is enough; it is awaited,
    and at the deadline what those that are wanted have said by then is heard. ``of_leaders``: what
    is wanted are the Parts of their groups.
    """

    key: Key
    body: Body | None
    wanted: range | tuple[int, ...]
    above: int | None = None
    to: tuple[int, ...] | None = None
    of_leaders: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Tell:
    """Tell ``to``, who listen in the gathering of that key; others may hear it, too. Nobody is
    waited for.
    """

    key: Key
    body: Prepare | Part | Tally
    to: tuple[int, ...]


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
    | BeginLine
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

_Missing: TypeAlias = tuple[int, ...]
_Ended: TypeAlias = Callable[[dict[int, Body], _Missing], "Action | None"]
_Decide: TypeAlias = Callable[[Tally], "Action | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class Poll:
    """``count`` makes a tally of what was heard of some ranks, or None where it cannot be known
    (see ``Machine._uncounted``). ``total`` does of what groups have said: who is against, the
    leaders that were not heard, and the digests of the others. ``decide`` gets the tally, whoever
    has counted. ``attempt``: what it is about; ``speakers``: who says something (None: all ranks).
    """

    key: Key
    attempt: Attempt | None
    count: Callable[[dict[int, Body], _Missing], Tally | None]
    total: Callable[[dict[int, str], _Missing, list[str]], Tally | None]
    decide: _Decide
    speakers: frozenset[int] | None = None


class Machine(abc.ABC):
    """``action``: what is to be done next; None when ``outcome`` is there."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.outcome: Outcome | None = None
        self.action: Action | None = None
        self._heard: dict[int, Body] = {}
        self._ended: _Ended | None = None
        self._poll: Poll | None = None
        self._part: Tally | None = None
        self._unheard: _Missing = ()

    def start(self) -> Action | None:
        self.action = self._begin()
        return self.action

    def on(self, event: Event) -> Action | None:
        """The next action; the same one while it goes on, None at the end."""
        action = self.action
        if isinstance(event, Heard | DeadlinePassed):
            if isinstance(action, Gather) and event.key == action.key:
                self._listen(action, event)
        elif action == event.action and not isinstance(action, Gather):
            if isinstance(action, Tell):
                self.action = self._told(action.body)
            else:
                self.action = self._proceed(event)
        return self.action

    def _listen(self, action: Gather, event: Heard | DeadlinePassed) -> None:
        if isinstance(event, Heard):
            sender, body = event.sender, event.body
            if isinstance(body, Tally):
                self._hear_tally(action, sender, body)
                return
            is_fit = self._is_of_ranks(body.tally) if isinstance(body, Part) else True
            is_wanted = sender in action.wanted and isinstance(body, Part) == action.of_leaders
            if is_wanted and is_fit:
                self._heard.setdefault(sender, body)
            if not self._is_complete(action):
                return
        self._end_gathering(action)

    def _is_complete(self, action: Gather) -> bool:
        """Who wants nobody waits for a tally."""
        return bool(action.wanted) and len(self._heard) == len(action.wanted)

    def _end_gathering(self, action: Gather) -> None:
        heard, ended = self._heard, self._ended
        missing = tuple(rank for rank in action.wanted if rank not in heard)
        self._heard, self._ended = {}, None
        if ended is not None:
            self.action = ended(heard, missing)

    def _gather(self, action: Gather, ended: _Ended) -> Action | None:
        """``ended`` gets what was heard, and who was not."""
        self._heard = {}
        if not action.wanted and action.above is None:
            return ended({}, ())
        self._ended = ended
        return action

    def _key(self, phase: str, number: int = 0) -> Key:
        """``number`` tells gatherings of one phase apart."""
        return Key(self.place.incarnation, self.place.call, phase, number)

    def _told(self, body: Prepare | Part | Tally) -> Action | None:
        """What was to be told was."""
        if isinstance(body, Part):
            return self._ask_leaders()
        return self._decide_by(body) if isinstance(body, Tally) else self.action

    # --- polls ------------------------------------------------------------------------------

    def _begin_poll(self, poll: Poll, body: Body | None) -> Action | None:
        """A leader hears its group. Others wait for the tally; where that does not come they count
        what all have said, or in a job of many groups what these have.
        """
        place, speakers = self.place, poll.speakers
        self._poll, self._part, self._unheard = poll, None, ()
        wanted = tuple(r for r in place.group if speakers is None or r in speakers)
        if place.leads:
            return self._gather(Gather(poll.key, body, wanted, None, ()), self._count_group)
        above = place.leader
        if place.is_flat:
            return self._gather(Gather(poll.key, body, wanted, above, (above,)), self._count_all)
        waiting = Gather(poll.key, body, (), above, (above,))
        return self._gather(waiting, lambda _heard, _missing: self._ask_leaders())

    def _count_all(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        tally = None if self._poll is None else self._poll.count(heard, missing)
        return self._counted(tally, missing)

    def _count_group(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        poll, place = self._poll, self.place
        if place.is_flat or poll is None:
            return self._count_all(heard, missing)
        self._part, self._unheard = poll.count(heard, missing), missing
        if self._part is None:
            return self._ask_leaders()
        return Tell(poll.key, Part(self._part), (0,) if place.rank else ())

    def _ask_leaders(self) -> Action | None:
        """Rank 0 hears all parts. Others wait for its tally, or count these parts themselves."""
        poll, place = self._poll, self.place
        if poll is None:
            return None
        others = tuple(rank for rank in place.leaders if rank != place.rank)
        above = 0 if place.rank else None
        asking = Gather(poll.key, None, others, above, (), of_leaders=True)
        return self._gather(asking, self._count_groups)

    def _count_groups(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        poll, place = self._poll, self.place
        if poll is None:
            return None
        parts = {rank: body.tally for rank, body in heard.items() if isinstance(body, Part)}
        if self._part is not None:
            parts[place.rank] = self._part
        elif place.leads:
            missing = (*missing, place.rank)
        against: dict[int, str] = {}
        for leader, part in parts.items():
            against |= dict(part.against)
            if not part.against and part.attempt != poll.attempt:
                against[leader] = f"its group is at {part.attempt}"
        digests = [part.digest for part in parts.values()]
        tally = poll.total(against, missing, digests)
        return self._counted(tally, self._unheard or missing)

    def _counted(self, tally: Tally | None, missing: _Missing) -> Action | None:
        if tally is not None:
            return self._pass_on(tally)
        return None if self._poll is None else self._uncounted(self._poll.key.phase, missing)

    def _uncounted(self, phase: str, missing: _Missing) -> Action | None:
        """What was heard is not enough to know it."""
        self._finish(Undecided(phase, missing))
        return None

    def _hear_tally(self, action: Gather, sender: int, tally: Tally) -> None:
        """Of who tells this rank, or rank 0."""
        if action.above is not None and sender in {action.above, 0} and self._is_of_ranks(tally):
            self._heard, self._ended = {}, None
            self.action = self._pass_on(tally)

    def _is_of_ranks(self, tally: Tally) -> bool:
        """And of none that there is not."""
        return all(rank < self.place.world for rank, _ in tally.against)

    def _pass_on(self, tally: Tally) -> Action | None:
        if self.place.below and self._poll is not None:
            return Tell(self._poll.key, tally, self.place.below)
        return self._decide_by(tally)

    def _decide_by(self, tally: Tally) -> Action | None:
        return None if self._poll is None else self._poll.decide(tally)

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome

    @abc.abstractmethod
    def _begin(self) -> Action | None: ...

    @abc.abstractmethod
    def _proceed(self, event: Done | Failed) -> Action | None: ...
