"""Running a level: processes, progress, results that a later run goes on with.

The result is one JSON document; the hashes of the images stand beside it in ``RESULT.images`` (64
bits each), so that images are counted once however often a campaign was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tests.support.crash.levels import UnitResult, run_unit, units_of
from tests.support.crash.readings import noted_readers
from tests.support.crash.runner import Failure
from tests.support.crash.world import fixed_world

SAVE_SECONDS = 20.0
LINE_SECONDS = 60.0
"""Between two lines of progress where there is no terminal."""
UNITS_OF_A_PROCESS = 400
"""Then another one takes its place: what little it leaked is gone."""
FAILURES_SHOWN = 20


@dataclasses.dataclass(slots=True)
class Campaign:
    """What is known of one level and seed. ``done``: (points, images, recoveries) of each unit."""

    level: str
    seed: int
    done: dict[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    failures: dict[str, list[Failure]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    """Of all processes together."""

    def add(self, result: UnitResult) -> None:
        self.done[result.name] = result.points, len(result.images), result.recoveries
        self.seconds += result.seconds
        if result.failures:
            self.failures[result.name] = result.failures

    @property
    def images(self) -> int:
        """Judged, counted once for each unit."""
        return sum(images for _, images, _ in self.done.values())

    @property
    def complete(self) -> bool:
        return len(self.done) == len(units_of(self.level, self.seed))

    def command(self, unit: str, failure: Failure) -> str:
        """What judges just that image again."""
        image = f" --image {failure.image}" if failure.image.strip("0") else ""
        return f"scripts/crash-test --seed {self.seed} --unit {unit}{image}"

    def as_json(self, distinct: int) -> dict[str, object]:
        return {
            "level": self.level,
            "seed": self.seed,
            "passed": not self.failures,
            "complete": self.complete,
            "workloads": len(self.done),
            "points": sum(points for points, _, _ in self.done.values()),
            "images": self.images,
            "distinct_images": distinct,
            "recoveries": sum(recoveries for _, _, recoveries in self.done.values()),
            "machine_seconds": round(self.seconds, 1),
            "saved": time.strftime("%Y-%m-%d %H:%M:%S"),
            "failures": [
                {
                    "unit": unit,
                    "event": failure.event,
                    "image": failure.image,
                    "problem": failure.problem,
                    "command": self.command(unit, failure),
                }
                for unit, failures in self.failures.items()
                for failure in failures
            ],
            "units": self.done,
        }


class Record:
    """A campaign on disk; without a path it is kept in memory only."""

    def __init__(self, level: str, seed: int, path: Path | None) -> None:
        self.campaign = Campaign(level, seed)
        self._path = path
        self._images: list[np.ndarray] = []
        self._unsaved: list[np.ndarray] = []
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        """Raises ValueError when it is another campaign's."""
        found = json.loads(path.read_text())
        campaign = self.campaign
        if (found["level"], found["seed"]) != (campaign.level, campaign.seed):
            raise ValueError(f"{path} is of level {found['level']}, seed {found['seed']}")
        failed = {failure["unit"] for failure in found["failures"]}
        campaign.done = {k: tuple(v) for k, v in found["units"].items() if k not in failed}
        campaign.seconds = found["machine_seconds"]
        beside = self._beside(path)
        if beside.exists():
            self._images.append(np.fromfile(beside, dtype=np.uint64))

    def _beside(self, path: Path) -> Path:
        return path.with_name(path.name + ".images")

    def add(self, result: UnitResult) -> None:
        self.campaign.add(result)
        self._unsaved.append(np.array(result.images, dtype=np.uint64))

    def distinct_images(self) -> int:
        parts = [*self._images, *self._unsaved]
        return len(np.unique(np.concatenate(parts))) if parts else 0

    def save(self) -> None:
        """The document is replaced as a whole; images are only added to."""
        path = self._path
        if path is None:
            return
        if self._unsaved:
            with self._beside(path).open("ab") as stream:
                np.concatenate(self._unsaved).tofile(stream)
            self._images.extend(self._unsaved)
            self._unsaved.clear()
        text = json.dumps(self.campaign.as_json(self.distinct_images()))
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False
        ) as stream:
            stream.write(text)
        Path(stream.name).replace(path)


# --- running --------------------------------------------------------------------------------


def run_campaign(
    level: str,
    seed: int,
    *,
    jobs: int,
    path: Path | None = None,
    quiet: bool = False,
    only: str = "",
) -> tuple[Campaign, int]:
    """Do what is not done yet, of units with ``only`` in the name; returns the campaign and how
    many images are distinct. Raises ValueError.
    """
    record = Record(level, seed, path)
    campaign = record.campaign
    units = [unit for unit in units_of(level, seed) if only in unit]
    if not units:
        raise ValueError(f"no unit of {level} has {only!r} in its name")
    todo = [unit for unit in units if unit not in campaign.done]
    progress = Progress(level, len(units), len(units) - len(todo), quiet=quiet)
    saved = time.monotonic()
    try:
        for result in run_units(todo, seed, jobs=jobs):
            record.add(result)
            progress.show(result, campaign)
            if time.monotonic() - saved > SAVE_SECONDS:
                record.save()
                saved = time.monotonic()
    finally:
        progress.end()
        record.save()
    return campaign, record.distinct_images()


def run_units(units: Iterable[str], seed: int, *, jobs: int) -> Iterator[UnitResult]:
    """Results in the order in which they are there."""
    tasks = ((unit, seed) for unit in units)
    if jobs <= 1:
        with prepared():
            for task in tasks:
                yield _run_one(task)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, _prepare_process, maxtasksperchild=UNITS_OF_A_PROCESS) as pool:
        yield from pool.imap_unordered(_run_one, tasks)


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """A process that runs units: a fixed world, no log, no collector in between, and what was there
    before is not looked at behind each unit (with all tests in memory that takes half a second).
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.disable()
    nothing_is_frozen = not gc.get_freeze_count()
    gc.freeze()
    try:
        with fixed_world(), noted_readers():
            yield
    finally:
        if nothing_is_frozen:
            gc.unfreeze()
        gc.enable()
        logging.disable(disabled)


_of_this_process = contextlib.ExitStack()


def _prepare_process() -> None:
    """For the life of a worker. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _of_this_process.enter_context(prepared())


def _run_one(task: tuple[str, int]) -> UnitResult:
    result = run_unit(*task)
    gc.collect()
    return result


def repeat(unit: str, seed: int, image: int | None) -> UnitResult:
    """One unit again, or one image of it."""
    with prepared():
        return run_unit(unit, seed, only=image)


class Progress:
    """On a terminal one line that changes, elsewhere a line now and then."""

    def __init__(self, level: str, total: int, done: int, *, quiet: bool) -> None:
        self._level = level
        self._total = total
        self._first_done = done
        self._began = self._shown = time.monotonic()
        self._images = 0
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()

    def show(self, result: UnitResult, campaign: Campaign) -> None:
        self._images += len(result.images)
        for failure in result.failures if not self._quiet else ():
            if len(campaign.failures) <= FAILURES_SHOWN:
                command = campaign.command(result.name, failure)
                self._say(f"FAILED {result.name}: {failure.problem}\n    {command}\n")
        now = time.monotonic()
        if self._quiet or now - self._shown < (0.2 if self._terminal else LINE_SECONDS):
            return
        self._shown = now
        done = len(campaign.done)
        elapsed = now - self._began
        left = (self._total - done) * elapsed / max(1, done - self._first_done)
        line = (
            f"{self._level}: {done} of {self._total} workloads, {campaign.images} images, "
            f"{self._images / elapsed:.0f}/s, {len(campaign.failures)} failed, "
            f"{left / 60:.0f} min left"
        )
        self._say(f"\r\x1b[K{line}" if self._terminal else line + "\n")

    def end(self) -> None:
        if self._terminal and not self._quiet:
            self._say("\r\x1b[K")

    def _say(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def default_jobs() -> int:
    return len(os.sched_getaffinity(0))
