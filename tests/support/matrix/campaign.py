"""One framework in one place, met by one kind of event again and again: what its own resume finds.

| event | what happens in mid-save |
|---|---|
| trainer | SIGKILL of the training program |
| daemon | SIGKILL of the daemon; a new mount |
| interrupt | SIGINT (Ctrl-C) |
| terminate | SIGTERM |
| exit-0, exit-143 | SIGTERM, and a handler that calls ``sys.exit`` with that code |
| exception | an exception in the program, at a random instant |
| caught | the same, caught by the program, which ends with 0 |
| full | no room for the save but so many tenths of it; then there is room again |

A log that the program appends to lies beside the checkpoints, and is open all the time.
The instants are spread evenly over the time that a save takes, and shuffled by the seed. Each life
of the program resumes what the one before has left, and is judged by what it then holds:

| outcome | what was found |
|---|---|
| new, old | exactly one step: the one being saved, or the last whose save had returned |
| older | exactly one step, saved before that |
| nothing | the program begins anew although it had saved |
| failed | its resume ends with an error |
| mixed | it goes on with bytes of several steps, or of none |

After the last three somebody must look: the directory is emptied, and the next save is a first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator

from cxlfs.errors import CxlfsError
from tests.support.matrix.catalogue import (
    PAUSE_SECONDS,
    PAUSE_WHERE_QUIET_SECONDS,
    Framework,
)
from tests.support.matrix.places import Place
from tests.support.matrix.trainer import Life, Trainer

EVENTS = (
    *("trainer", "daemon", "interrupt", "terminate", "exit-0", "exit-143"),
    *("exception", "caught", "full"),
)
RESUMED = ("new", "old", "older")
LOST = ("nothing", "failed", "mixed")
OUTCOMES = (*RESUMED, *LOST)
SAVES_TO_MEASURE = 3
DURATIONS = 9
"""Of so many saves the median is taken: the first ones of a program are slower."""
END_SECONDS = 15.0
"""A program that does not end by itself after an event is killed."""
_FAILS_SECONDS = 0.5
_OVER = 1.1
"""Instants reach a little behind the end of a save."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """Of one campaign; ``between``: events that came when no save was running."""

    framework: str
    place: str
    event: str
    seed: int
    wanted: int
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    between: int = 0
    hung: int = 0
    causes: dict[str, int] = dataclasses.field(default_factory=dict)
    save_seconds: float = 0.0
    seconds: float = 0.0
    problem: str | None = None
    """Why it came to no end."""

    @property
    def events(self) -> int:
        return sum(self.counts.values())

    @property
    def resumed(self) -> int:
        return sum(self.counts[name] for name in RESUMED)


class Campaign:
    """See the module. ``restart_seconds``: from the end of a program to its next start."""

    def __init__(
        self,
        framework: Framework,
        place: Place,
        trainer: Trainer,
        outcome: Outcome,
        restart_seconds: float,
    ) -> None:
        self.framework = framework
        self.place = place
        self.trainer = trainer
        self.outcome = outcome
        self.restart_seconds = restart_seconds
        self.random = random.Random(f"{outcome.framework} {outcome.event} {outcome.seed}")
        self.saved = 0
        """The last step whose save returned; 0 where the directory is empty."""
        self.begun = 0
        self._durations: list[float] = []

    def run(self) -> None:
        begin = time.monotonic()
        self.outcome.versions = self.trainer.versions
        self.measure()
        life: Life | None = None
        for fraction in self._fractions():
            life = self.resume(judged=life is not None)
            self._meet(life, fraction)
            self.note(life)
            time.sleep(self.restart_seconds)
        self.resume(judged=True)
        self.end()
        self.outcome.seconds = round(time.monotonic() - begin, 1)

    def _fractions(self) -> Iterator[float]:
        count = self.outcome.wanted
        places = list(range(count))
        self.random.shuffle(places)
        for number in places:
            yield _OVER * (number + self.random.random()) / count

    # --- lives ------------------------------------------------------------------------------

    def start(self, **order: object) -> Life:
        if self.framework.temporary_below:
            temporary = self.place.root / "tmp"
            temporary.mkdir(exist_ok=True)
            order["TMPDIR"] = str(temporary)
        return self.trainer.start(
            self.place.directory,
            first=self.begun,
            pause_seconds=self._pause_seconds,
            ending=self.outcome.event,
            **order,
        )

    @property
    def _pause_seconds(self) -> float:
        has_quiet_time = self.place.has_policies and not self.framework.expects_marker
        return PAUSE_WHERE_QUIET_SECONDS if has_quiet_time else PAUSE_SECONDS

    def measure(self) -> None:
        """How long a save takes, and how much room."""
        life = self.start(saves=SAVES_TO_MEASURE)
        assert life.found == "nothing", f"an empty directory: {life}"
        assert self.trainer.wait_until_ended(), "a save does not end"
        assert life.error is None, life.error
        self.saved = self.begun = life.saved
        self._learn(life)
        self.outcome.save_seconds = round(self.save_seconds, 4)
        self.save_bytes = self.place.used_bytes() // self.framework.kept
        time.sleep(self.restart_seconds)

    def _learn(self, life: Life) -> None:
        self._durations = [*self._durations, *life.save_seconds][-DURATIONS:]
        self.save_seconds = statistics.median(self._durations)

    def resume(self, *, judged: bool) -> Life:
        """A life that has resumed, or begun in an emptied directory."""
        hold = {"hold": 1, "saves": 4} if self.outcome.event == "full" else {}
        life = self.start(**hold)
        verdict, cause = self._judge(life)
        if judged:
            self.outcome.counts[verdict] += 1
            if cause:
                self.outcome.causes[cause] = self.outcome.causes.get(cause, 0) + 1
        if verdict in LOST:
            assert judged, f"a program that ended by itself cannot resume: {verdict}, {cause}"
            self.end()
            self.place.wipe()
            self.saved = 0
            life = self.start(**hold)
            assert life.found == "nothing", f"an emptied directory: {life}"
        elif isinstance(life.found, dict):
            self.saved = self.begun = life.found["steps"][0]
        return life

    def _judge(self, life: Life) -> tuple[str, str]:
        if life.found is None:
            return "failed", _shorten(life.failure or "it ended without a word")
        if isinstance(life.found, str):
            if self.saved:
                return "nothing", "it begins anew"
            return ("old", "") if self.begun else ("new", "")
        steps = life.found["steps"]
        if life.found["wrong"]:
            return "mixed", "bytes of no step"
        if len(steps) != 1:
            return "mixed", "bytes of several steps"
        if steps[0] == self.saved:
            return "old", ""
        if steps[0] == self.begun:
            return "new", ""
        return ("older", "") if steps[0] < self.saved else ("mixed", "a step that nobody saved")

    def end(self) -> None:
        self.trainer.signal(signal.SIGKILL)
        self.trainer.wait_until_ended()

    def note(self, life: Life) -> None:
        """Which steps count from now on: some programs begin at 1 again in an emptied directory."""
        if life.saved >= 0:
            self.saved = life.saved
        if life.begun >= 0:
            self.begun = life.begun

    # --- events -----------------------------------------------------------------------------

    def _meet(self, life: Life, fraction: float) -> None:
        if self.outcome.event == "full":
            self._meet_full(life, fraction / _OVER)
            return
        # A first save has nothing before it that could be resumed from.
        count = (
            1
            + (not self.saved)
            + self.random.randrange(2 if self._pause_seconds > PAUSE_SECONDS else 3)
        )
        self.trainer.wait_for(lambda: life.begins >= count or life.ended, "it saves")
        delay = life.begin_seconds + fraction * self.save_seconds - time.monotonic()
        time.sleep(max(delay, 0.0))
        self._happen()
        if self.outcome.event == "daemon":
            self._end_without_daemon(life)
        self.outcome.hung += not self.trainer.wait_until_ended(END_SECONDS)
        self.outcome.between += life.begun <= life.saved
        self._learn(life)
        if self.outcome.event == "daemon":
            self.place.mount_again()
        else:
            assert life.error is None or self.outcome.event != "trainer", life.error

    def _end_without_daemon(self, life: Life) -> None:
        """It has met an error; winding up an interpreter takes longer and writes nothing more."""
        with contextlib.suppress(AssertionError):
            self.trainer.wait_for(lambda: life.error is not None, "it fails", _FAILS_SECONDS)
        self.trainer.signal(signal.SIGKILL)

    def _happen(self) -> None:
        match self.outcome.event:
            case "trainer":
                self.trainer.signal(signal.SIGKILL)
            case "daemon":
                self.place.kill_daemon()
            case "interrupt":
                self.trainer.signal(signal.SIGINT)
            case "terminate" | "exit-0" | "exit-143":
                self.trainer.signal(signal.SIGTERM)
            case "exception" | "caught":
                self.trainer.signal(signal.SIGUSR1)

    def _meet_full(self, life: Life, fraction: float) -> None:
        self.trainer.wait_for(lambda: life.held or life.ended, "it has saved once")
        if self._pause_seconds > PAUSE_SECONDS:
            time.sleep(self._pause_seconds)  # what was saved is done
        self.place.fill(int(fraction * self.save_bytes))
        self.trainer.signal(signal.SIGCONT)
        self.outcome.hung += not self.trainer.wait_until_ended(END_SECONDS)
        self.outcome.between += life.begun <= life.saved
        self.place.empty()


def _shorten(text: str) -> str:
    """The same for the same cause: the last line that names an error, without numbers and paths."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    words = (named or lines or ["no word"])[-1].split()
    return " ".join("…" if re.search(r"[/\d]", word) else word for word in words)[:90]


def run_campaign(
    outcome: Outcome, framework: Framework, place: Place, trainer: Trainer, restart: float = 0.0
) -> None:
    """Fill ``outcome``; what goes wrong with the harness becomes its ``problem``. ``restart``:
    seconds from the end of a program to its next start. The trainer may be used again where there
    was no problem.
    """
    try:
        place.prepare(framework)
        Campaign(framework, place, trainer, outcome, restart).run()
    except (AssertionError, OSError, CxlfsError) as error:
        outcome.problem = f"{type(error).__name__}: {error}"
