"""Power cuts on emulated persistent memory: what is done to each target, and what must be found.

For each target: make a store, mount it, save, cut the power, boot again, mount (which recovers),
compare every file with the ledger, look at ``cxlfs status``, verify, go on saving; at the end one
clean unmount and, but for the short form, a reboot that must find exactly what was left.

Cuts come at points named in advance (half of a file written; a rename just begun) or after a
random time; the random numbers come from one seed, which is printed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.vm import expected
from tests.vm.cuts import Cut
from tests.vm.ledger import Entry, Found, Ledger, Operation
from tests.vm.machine import MIB, Boot, Event, Machine, Target, make_media
from tests.vm.needs import Kernel

STEPS_WITHOUT_END = 100_000
STORE_FILE_SIZE = "256M"
CHECKPOINT_BYTES = 4 * MIB
REFUSALS = {"nvdimm-devdax": 3, "nvdimm-xfs": 2, "nvdimm-ext4": 2}
"""So many sources that are in use must have been refused."""


@dataclass(slots=True)
class Round:
    """One boot: what was asked for, and what came out."""

    actions: list[str]
    cut: str = ""
    cut_in: str = ""
    outcome: str = ""
    files_compared: int = 0
    operations: int = 0
    commands: dict[str, float] = field(default_factory=dict)
    scenes: dict[str, dict[str, object]] = field(default_factory=dict)
    seconds_to_start: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class TargetResult:
    target: str
    rounds: list[Round] = field(default_factory=list)
    volatile_refused: bool = False
    in_use_refused: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [problem for one in self.rounds for problem in one.problems]

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "problems": self.problems}


class Campaign:
    """All rounds of one target. ``say`` takes progress lines."""

    def __init__(
        self,
        target: Target,
        work: Path,
        kernel: Kernel,
        accel: str,
        *,
        python: Path,
        directory: Path,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        direct: bool = False,
    ) -> None:
        """``direct``: programs store by themselves (direct_scenes), and all saves are like that."""
        self._target, self._say, self._direct = target, say, direct
        self._python = python
        self._directory, self._environment = directory, environment
        media = work / "media"
        make_media(target, media)
        self._machine = Machine(target, media, work, kernel, accel)
        self._ledger = Ledger()
        self._step = 1
        self._after_cut = False
        self._renames = 0
        self._command_began = self._mount_seconds = 0.0
        self._in_recovery = False
        self._round = Round([])
        self._cut: Cut | None = None
        self.result = TargetResult(target.name)

    # ---------------------------------------------------------------------------------- events

    def _problem(self, text: str) -> None:
        self._round.problems.append(text)

    def _on_event(self, event: Event) -> None:
        handler: Callable[[Event], None] = getattr(self, f"_on_{event['event']}")
        handler(event)

    def _cut_of(self, kind: str) -> Cut | None:
        return self._cut if self._cut is not None and self._cut.kind == kind else None

    def _on_begin(self, event: Event) -> None:
        operation = Operation(**event["operation"])
        self._ledger.begin(operation)
        if operation.kind == "write":
            self._step = max(self._step, int(operation.seed.rpartition(" ")[2]))
        cut = self._cut_of("rename")
        if cut is not None and operation.kind == "rename":
            self._renames += 1
            if self._renames == cut.count:
                self._machine.cut()

    def _on_middle(self, event: Event) -> None:
        cut = self._cut_of("hold")
        if cut is not None and event["seed"] == cut.version:
            self._machine.cut()

    def _on_done(self, event: Event) -> None:
        self._ledger.done(event["number"])

    def _on_saving(self, _event: Event) -> None:
        cut = self._cut_of("delay")
        if cut is not None:
            self._machine.cut_after(cut.seconds)

    def _on_saved(self, _event: Event) -> None:
        """Nothing: the operations themselves were announced."""

    def _on_running(self, event: Event) -> None:
        self._in_recovery = event["command"] == "mount"
        self._command_began = time.monotonic()
        cut = self._cut_of("recovery")
        if cut is not None and self._in_recovery:
            self._machine.cut_after(cut.fraction * self._mount_seconds)

    def _on_ran(self, event: Event) -> None:
        self._in_recovery = False
        name = event["arguments"][0]
        # By the clock of this machine: a guest's runs unevenly, even backwards, under load.
        self._round.commands[name] = round(time.monotonic() - self._command_began, 1)
        if name == "mount":
            self._mount_seconds = self._round.commands[name]

    def _on_status(self, event: Event) -> None:
        report = event["report"]
        for line in expected.status_problems(self._target, report, after_cut=self._after_cut):
            self._problem(f"status: {line}")

    def _on_scene(self, event: Event) -> None:
        self._round.scenes[event["scene"]] = event["facts"]
        self._say(f"{self._target.name}: {event['scene']}: {json.dumps(event['facts'])}")

    def _on_refused(self, _event: Event) -> None:
        self.result.volatile_refused = True

    def _on_in_use(self, event: Event) -> None:
        self.result.in_use_refused.append(event["what"])

    def _on_failed(self, event: Event) -> None:
        self._problem(event["message"])

    def _on_listing(self, event: Event) -> None:
        found = {
            path: Found(Entry(have["size"], have["digest"]), have["state"])
            for path, have in event["entries"].items()
        }
        outcome, problems = self._ledger.judge(found)
        self._round.files_compared = len(found)
        self._round.outcome = outcome or "wrong"
        for line in problems:
            self._problem(f"after the mount: {line}")
        if problems:
            self._machine.cut()  # the media stays as it is, for whoever looks into it

    # ---------------------------------------------------------------------------------- rounds

    def _boot(self, actions: list[str], cut: Cut | None) -> bool:
        """One boot; False when it found a problem."""
        self._round, self._cut, self._renames = Round(actions, str(cut or "")), cut, 0
        self._in_recovery = False
        self.result.rounds.append(self._round)
        done_before = self._ledger.operations_done
        program = str(self._python.parent / "cxlfs")
        command = [str(self._python), "-m", "tests.vm.agent", "--size", str(CHECKPOINT_BYTES)]
        boot = self._machine.boot(
            [*command, "--program", program, "--", *actions],
            self._on_event,
            directory=self._directory,
            environment=self._environment,
        )
        if self._machine.stopped:
            return False
        self._round.operations = self._ledger.operations_done - done_before
        self._round.seconds = round(boot.seconds, 1)
        self._round.seconds_to_start = round(boot.seconds_to_start, 1)
        self._settle(boot)
        self._after_cut = boot.cut
        self._tell()
        return not self._round.problems

    def _settle(self, boot: Boot) -> None:
        if boot.cut and not self._round.problems:
            operation = self._ledger.in_flight
            if self._in_recovery:
                self._round.cut_in = "the mount"
            elif operation is not None:
                self._round.cut_in = f"{operation.kind} {operation.path}"
            else:
                self._round.cut_in = "no operation"
        if not self._round.problems and (boot.cut != (self._cut is not None)):
            self._problem(f"the power cut did not come: {boot.describe()}")
        if not boot.cut and boot.status != 0 and not self._round.problems:
            self._problem(boot.describe())
        if self._round.problems:
            tail = "\n".join(boot.console.splitlines()[-30:])
            self._problem(f"output:\n{boot.output}\nconsole:\n{tail}")

    def _tell(self) -> None:
        one = self._round
        parts = [f"boot {len(self.result.rounds)}, {one.seconds:.1f} s"]
        if one.outcome:
            parts.append(f"{one.files_compared} entries compared ({one.outcome})")
        parts += [f"{name} {seconds:.1f} s" for name, seconds in one.commands.items()]
        if one.operations:
            parts.append(f"{one.operations} operations")
        if one.cut_in:
            parts.append(f"power cut {one.cut}, in: {one.cut_in}")
        parts += [f"PROBLEM: {line}" for line in one.problems]
        self._say(f"{self._target.name}: " + "; ".join(parts))

    def _saving(self, cut: Cut | None) -> str:
        """The action that saves from the next step on: without end, or two steps."""
        first = self._step + 1 if self._ledger.operations_done else 1
        last = first + 1 if cut is None else first + STEPS_WITHOUT_END
        ways = "numpy" if cut is not None and cut.kind == "delay" else "direct"
        if self._direct:
            ways = "all-direct"
        return f"save:{first}:{last}:{ways}:{cut.version if cut else ''}"

    def _named(self, cut: Cut) -> Cut:
        """The same cut, with a step number instead of "so many steps from now"."""
        name, _, later = cut.version.partition(" +")
        if not later:
            return cut
        step = self._step + int(later)
        step += step % 2 if name.startswith("shards") else 0
        return Cut(cut.kind, version=f"{name} {step}")

    def stop(self) -> None:
        """End the campaign soon; may be called from any thread."""
        self._machine.stop()

    def run(self, cuts: Sequence[Cut], *, reboot: bool = True) -> TargetResult:
        """All rounds; stops at the first problem, since nothing after it can be judged. ``reboot``
        after the clean unmount: a minute for what the verify before it nearly says.
        """
        size = "" if self._target.mode == "devdax" else STORE_FILE_SIZE
        actions = [f"make:{size}", "mount"]
        if self._direct:
            actions.append("direct")
            actions += ["direct_in_memory"] if self._target.name == "nvdimm-devdax" else []
        elif self._target.device == "nvdimm":
            actions.append("refuse_mounted")
        if self._refuses_all:
            actions = ["refuse", "refuse_system_memory", "refuse_mapped", *actions]
        began = time.monotonic()
        for number, planned in enumerate(cuts):
            cut = self._named(planned)
            last = [self._saving(cut)]
            verify = ["verify:mounted"] if number % 2 else []
            if not self._boot([*actions, *verify, *last] if number else [*actions, *last], cut):
                return self.result
            actions = ["mount", "list", "status"]
        clean = [*actions, self._saving(None), "unmount", "verify:unmounted"]
        if self._boot(clean, None) and reboot:
            self._boot(["mount", "list", "status", "unmount"], None)
        self._check_refusals()
        self._say(f"{self._target.name}: done in {time.monotonic() - began:.0f} s")
        return self.result

    @property
    def _refuses_all(self) -> bool:
        """Whether every refusal of a device is tried: on one target, for they take their time."""
        return self._target.name == "nvdimm-devdax" and not self._direct

    def _check_refusals(self) -> None:
        result = self.result
        if result.problems:
            return
        if self._refuses_all and not result.volatile_refused:
            self._problem("no volatile region came up, so that its refusal was not seen")
        wanted = REFUSALS.get(self._target.name, 0) if not self._direct else 0
        if len(result.in_use_refused) != wanted:
            self._problem(f"{wanted} refusals of what is in use, not {result.in_use_refused}")
