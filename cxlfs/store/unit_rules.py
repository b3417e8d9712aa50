"""Which directories are checkpoint units, and when the writing of one is over: pure decisions.

A *unit* is a directory whose files belong together. A rule says how one is recognised, and which
name (the *marker*) its writer publishes last. Where the order comes from, for each rule of the
table: the saving code of the named project (transformers 5, accelerate, torch 2.13, DeepSpeed,
Megatron-LM, Orbax, zarr 3, Keras 3), read or traced.

Never here: inodes, time, processes, the media (``units`` has those).
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import itertools
import re
from collections.abc import Collection, Iterable

QUIET_SECONDS = 30.0
"""After so long without a change a unit counts as finished although its marker has not come."""
QUIET_UNMARKED_SECONDS = 10.0
"""The same where none is expected: every second of it is one in which a kill takes a finished save
back, and between two files of one saver pass far less."""
_NAMES_LOOKED_AT = 64
"""So many of a directory show what it is."""
_NUMBER = re.compile(rb"[0-9]+")
_NAMES_KNOWN = 4096
"""Names whose rule is remembered: it is asked at each change, and found in some 10 µs."""
POLICY = "policy"
"""The name of the rules of policies."""
ITSELF = b"."
"""As a pattern of a policy: the directory that has the policy."""
EACH_FILE = b"*"
"""In the marker of a policy: a pattern, and each file of such a name is a checkpoint of its own,
there for good when it is closed or renamed and nothing else in the unit is being written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``directories``: patterns of names (fnmatch). ``files``: patterns of names in a directory of
    any name that show what it is. ``also``: names that a saver writes before those, and that count
    if some of those are there. ``done``: markers in the unit; ``done_beside``: in the directory
    above. ``after``: patterns of files that may rightly be written after the marker.
    ``always_marked``: one without a marker is not finished. ``marker_may_stay``: the same marker
    may be right for other contents of the same files. ``temporary``: patterns of names
    that a saver removes in a save. If there are some, it removes others only before it saves again.
    ``needs``: patterns of what comes last where
    there is no marker: needed are those that all beside have, and with each file of such a name
    that any has, it is finished.
    """

    name: str
    directories: tuple[bytes, ...] = ()
    files: tuple[bytes, ...] = ()
    also: tuple[bytes, ...] = ()
    done: tuple[bytes, ...] = ()
    done_beside: tuple[bytes, ...] = ()
    after: tuple[bytes, ...] = ()
    needs: tuple[bytes, ...] = ()
    always_marked: bool = True
    marker_may_stay: bool = False
    temporary: tuple[bytes, ...] = ()
    quiet_seconds: float = QUIET_SECONDS

    def knows(self, name: bytes) -> bool:
        """A file of that name is one of those that show what a directory is."""
        return matches(name, (*self.files, *self.also, *self.done))

    @property
    def expects_marker(self) -> bool:
        return bool(self.done or self.done_beside)

    @property
    def is_policy(self) -> bool:
        """A user has asked for it."""
        return self.name == POLICY

    @property
    def ends_with_each_file(self) -> bool:
        return has_pattern(self.done)

    def may_be_rewritten(self, name: bytes) -> bool:
        """Within one save."""
        return name in self.done or matches(name, self.temporary)

    def ends_with(self, name: bytes) -> bool:
        """Where each file is a checkpoint: one of that name is."""
        return matches(name, self.done)


def has_pattern(done: Iterable[bytes]) -> bool:
    """One of these markers stands for many files."""
    return any(EACH_FILE in name for name in done)


RECEIVING_NAME = b".cxlfs-receiving"
"""See ``tier.staging``: nothing below it is a unit."""
TABLE: tuple[Rule, ...] = (
    Rule(
        name="transformers",
        directories=(b"checkpoint-[0-9]*",),
        done=(b"trainer_state.json",),
        after=(b"rng_state*.pth",),  # of the other ranks
    ),
    Rule(
        name="accelerate",
        directories=(b"checkpoint_[0-9]*",),
        needs=(b"random_states_*.pkl", b"custom_checkpoint_*.pkl"),
        quiet_seconds=QUIET_UNMARKED_SECONDS,
    ),
    Rule(name="deepspeed", directories=(b"global_step[0-9]*",), done_beside=(b"latest",)),
    Rule(
        name="megatron",
        directories=(b"iter_[0-9]*",),
        done_beside=(b"latest_checkpointed_iteration.txt",),
    ),
    Rule(
        name="orbax",  # done by the rename of the directory
        directories=(b"*.orbax-checkpoint-tmp*",),
        done=(b"commit_success.txt",),
        always_marked=False,
    ),
    Rule(
        name="zarr",
        directories=(b"*.zarr",),
        done=(b"zarr.json", b".zmetadata"),
        after=(b"*",),  # it is written first, and once more where metadata is consolidated
        always_marked=False,
        temporary=(b"*.partial",),
    ),
    Rule(
        name="keras",  # BackupAndRestore
        files=(b"latest.weights.h5",),
        also=(b"latest.weights.h5.bkp", b"training_metadata.json.bkp"),
        done=(b"training_metadata.json",),
    ),
    Rule(name="dcp", files=(b"__[0-9]*_[0-9]*.distcp",), done=(b".metadata",)),
    Rule(
        name="safetensors",
        files=(b"*-[0-9]*-of-[0-9]*.safetensors",),
        also=(b"config.json", b"generation_config.json"),
        done=(b"model.safetensors.index.json", b"diffusion_pytorch_model.safetensors.index.json"),
        marker_may_stay=True,
    ),
)


_NEVER_EMPTY = (
    *(name for rule in TABLE for name in (*rule.done, *rule.done_beside)),
    *(b"*.json", b"*.pkl", b"*.pt", b"*.pth"),
)
FILE_MARKERS = frozenset(name for rule in TABLE if rule.files for name in rule.done)
"""What comes last where files show what a directory is."""
_BESIDE_FILES = frozenset(name for rule in TABLE if rule.files for name in (*rule.done, *rule.also))


def matches(name: bytes, patterns: Iterable[bytes]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@functools.lru_cache(maxsize=_NAMES_KNOWN)
def may_be_empty(marker: bytes) -> bool:
    """Whether a marker of that name says something without a byte in it, as one that is touched. A
    file that holds a format does not: its saver was interrupted between opening and writing it, and
    closes it while it ends.
    """
    return not matches(marker, _NEVER_EMPTY)


def rule_of_directory(name: bytes, rules: Iterable[Rule]) -> Rule | None:
    """The first rule that knows a directory by its own name."""
    return next((rule for rule in rules if matches(name, rule.directories)), None)


@functools.lru_cache(maxsize=_NAMES_KNOWN)
def known_directory(name: bytes) -> Rule | None:
    """The rule of TABLE that knows a directory by its own name."""
    return rule_of_directory(name, TABLE)


@functools.lru_cache(maxsize=_NAMES_KNOWN)
def known_file(name: bytes) -> Rule | None:
    """The rule of TABLE that knows a directory by a file of this name in it."""
    return next((rule for rule in TABLE if matches(name, rule.files)), None)


def rule_of_file(name: bytes, others: Iterable[bytes]) -> Rule | None:
    """The rule of TABLE that knows a directory by a file of this name in it: one of its kind, or
    its marker, or what comes before all others, beside ``others`` of its kind.
    """
    known = known_file(name)
    if known is not None or name not in _BESIDE_FILES:
        return known
    rules = [rule for rule in TABLE if rule.files and name in (*rule.done, *rule.also)]
    others = list(others)
    return next((r for r in rules if any(matches(other, r.files) for other in others)), None)


def rule_of_contents(names: Collection[bytes]) -> Rule | None:
    """The rule of TABLE that knows a directory by the names of its files, of which it has the
    marker.
    """
    for rule in TABLE:
        if rule.files and any(done in names for done in rule.done):
            first = itertools.islice(names, _NAMES_LOOKED_AT)
            if any(matches(name, rule.files) for name in first):
                return rule
    return None


@functools.lru_cache(maxsize=_NAMES_KNOWN)
def series_of(name: bytes) -> bytes | None:
    """What the names of one series of directories have in common, as ``step-`` of ``step-10`` and
    ``step-20``; None: there is no number in it.
    """
    series, count = _NUMBER.subn(b"0", name)
    return series if count else None


class UnitsMode(enum.Enum):
    """``POLICY``: only where a policy says so; ``AUTO``: the names of TABLE, too."""

    OFF = "off"
    POLICY = "policy"
    AUTO = "auto"


class Ending(enum.Enum):
    """What is known of a process that wrote."""

    ALIVE = "alive"
    WELL = "well"
    """It has ended with exit code 0."""
    BADLY = "badly"
    """With another one."""
    KILLED = "killed"
    """By a signal."""
    INTERRUPTED = "interrupted"
    """By SIGINT: a program that is told so may have closed its files before it ended itself."""
    UNKNOWN = "unknown"
    """It is gone, and nobody could tell how."""


_WRONG = frozenset({Ending.KILLED, Ending.INTERRUPTED})


class Decision(enum.Enum):
    """``KEEP``: a crash leaves it as it is, and only a writer's failure can take it back."""

    WAIT = "wait"
    KEEP = "keep"
    DONE = "done"
    BACK = "back"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an open unit.

    ``marked``: its marker was published behind other files; with ``each_file`` all that was written
    was closed by who lived. ``busy``: something below it is not
    published yet. ``spoiled``: a write failed, or a killed writer left something unfinished.
    ``followed``: its writers have begun the next one beside it. ``quiet``: nothing has changed for
    the time of its rule. ``closing``: the store is about to be closed. ``removed``: its directory
    was. ``lacks``: what is missing in it that others of its kind have, for people; it has no marker
    then.
    """

    expects_marker: bool
    each_file: bool = False
    marked: bool = False
    busy: bool = False
    spoiled: bool = False
    followed: bool = False
    quiet: bool = False
    closing: bool = False
    removed: bool = False
    lacks: str = ""
    endings: frozenset[Ending] = frozenset()


def decide(facts: Facts) -> tuple[Decision, str]:
    """What becomes of an open unit, and why."""
    if facts.marked and not facts.busy and not facts.spoiled:
        if facts.each_file:
            return _decide_closed(facts)
        return Decision.DONE, "its marker was published"
    if facts.closing:
        return _decide_closing(facts)
    if facts.busy and not (_are_over(facts) and facts.endings & _WRONG):
        return Decision.WAIT, "it is being written"  # or the RELEASE of who has ended is on its way
    if _are_over(facts):
        return _decide_ended(facts)
    if facts.followed and not facts.expects_marker and not _went_wrong(facts):
        return Decision.DONE, "the next one was begun"
    if not facts.quiet:
        return Decision.WAIT, "it may be written"
    if _went_wrong(facts):
        return Decision.BACK, _what_went_wrong(facts)
    return Decision.DONE, "nothing was written any more"


def _are_over(facts: Facts) -> bool:
    """Whoever wrote is gone."""
    return bool(facts.endings) and Ending.ALIVE not in facts.endings


def _decide_closed(facts: Facts) -> tuple[Decision, str]:
    """What a kill finds closed was finished. An exception and Ctrl-C close files half written, too,
    and end the program then.
    """
    if _are_over(facts) and facts.endings & {Ending.BADLY, Ending.INTERRUPTED}:
        return Decision.BACK, "a writer ended with an error"
    if _are_over(facts) or facts.followed or facts.quiet or facts.closing:
        return Decision.DONE, "it was closed"
    return Decision.KEEP, "its writer may end with an error"


def _decide_ended(facts: Facts) -> tuple[Decision, str]:
    """Whoever wrote is gone."""
    if _went_wrong(facts) or Ending.BADLY in facts.endings:
        return Decision.BACK, _what_went_wrong(facts)
    if Ending.UNKNOWN in facts.endings and facts.expects_marker:
        return Decision.BACK, "its writers are gone, and its marker has not come"
    if facts.lacks:
        return Decision.BACK, f"its writers have ended without {facts.lacks}"
    if facts.quiet or not facts.expects_marker:
        return Decision.DONE, "its writers have ended"
    return Decision.WAIT, "its marker may come"


def _decide_closing(facts: Facts) -> tuple[Decision, str]:
    """Nobody can go on with it."""
    if _went_wrong(facts) or Ending.BADLY in facts.endings or facts.busy:
        return Decision.BACK, _what_went_wrong(facts)
    if facts.lacks and _are_over(facts):
        return Decision.BACK, f"its writers have ended without {facts.lacks}"
    unfinished = facts.expects_marker and not facts.quiet
    if unfinished and facts.endings != frozenset({Ending.WELL}):
        return Decision.BACK, "its marker has not come"
    half = not (facts.expects_marker or facts.removed or facts.followed or facts.quiet)
    if half and Ending.ALIVE in facts.endings:
        return Decision.BACK, "its writer had not ended"
    return Decision.DONE, "the store is closed"


def _went_wrong(facts: Facts) -> bool:
    return facts.spoiled or bool(facts.endings & _WRONG)


def _what_went_wrong(facts: Facts) -> str:
    if facts.endings & _WRONG:
        return "a writer was killed"
    if facts.spoiled:
        return "a file of it could not be finished"
    if Ending.BADLY in facts.endings:
        return "a writer ended with an error"
    return "it was being written"
