"""Suites of others played in four places that must say the same: tmpfs, a mount, and the mount
under ``cxlfs run``, with its own threshold and storing every write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cxlfs.cli.run import environment_for, library_path
from cxlfs.control.client import control_request
from tests.support.mount import MIB, Workplace, fast_directory, workplace
from tests.support.run_fuzzing import large_pages
from tests.support.run_programs.suites import Suite

STORE_BYTES = 6144 * MIB
PLACES = ("tmpfs", "mount", "run", "run-all")
EVERY_WRITE = {"CXLFS_RUN_FROM": "1"}
EXPECTED_OF = {"mount": "tmpfs", "run": "mount", "run-all": "mount"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A test that says something else; one that is missing says nothing."""

    place: str
    part: str
    test: str
    expected: str
    found: str

    def line(self) -> str:
        test = f"{self.part} {self.test}".strip()
        return (
            f"  {self.place}: {test}: {self.found} (on {EXPECTED_OF[self.place]}: {self.expected})"
        )


@dataclasses.dataclass
class Result:
    """Of one suite in one place."""

    name: str
    version: str
    place: str
    outcomes: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """By part and test."""
    direct_bytes: int = 0
    differences: list[Difference] = dataclasses.field(default_factory=list)

    def count(self) -> int:
        return sum(len(each) for each in self.outcomes.values())

    def line(self) -> str:
        said = f"{self.name:8} {self.place:8} {self.count():6} tests"
        if self.place != "tmpfs":
            said += f", {len(self.differences)} other than on {EXPECTED_OF[self.place]}"
        if self.direct_bytes:
            said += f", {self.direct_bytes / MIB:.1f} MiB stored directly"
        return said


class Ground:
    """A mounted store, and a directory in memory."""

    def __init__(self, place: Workplace, scratch: Path) -> None:
        self.place = place
        self.scratch = scratch
        run = environment_for(library_path(), os.environ)
        self.environments: Mapping[str, Mapping[str, str]] = {
            "tmpfs": {**os.environ},
            "mount": {**os.environ},
            "run": run,
            "run-all": {**run, **EVERY_WRITE},
        }

    def direct_bytes(self) -> int:
        for message in control_request(str(self.place.mountpoint), "status"):
            direct = message["direct"]
            if isinstance(direct, dict):
                return int(direct["bytes_written"])
        return 0

    def play(self, suite: Suite, part: str, place: str) -> dict[str, str]:
        """In a directory of its own, with the same name everywhere."""
        parent = self.scratch if place == "tmpfs" else self.place.mountpoint
        directory = parent / "played"
        directory.mkdir()
        directory.chmod(0o777)
        try:
            return suite.play(part, directory, self.environments[place])
        finally:
            shutil.rmtree(directory)

    def compare(
        self, name: str, suite: Suite, places: Sequence[str], only: Sequence[str] = ()
    ) -> list[Result]:
        """Each part in all places before the next one. What differs is played once more in both:
        what differs then, in the same way, counts.
        """
        results = {place: Result(name, suite.version, place) for place in places}
        for part in [each for each in suite.parts if not only or each in only]:
            for place, result in results.items():
                before = self.direct_bytes()
                result.outcomes[part] = self.play(suite, part, place)
                result.direct_bytes += self.direct_bytes() - before
            for place, result in results.items():
                expected = results.get(EXPECTED_OF.get(place, ""))
                if expected is not None:
                    found = differences(place, part, expected, result)
                    result.differences += self._again(suite, part, place, found)
        return list(results.values())

    def _again(
        self, suite: Suite, part: str, place: str, found: list[Difference]
    ) -> list[Difference]:
        if not found:
            return []
        expected = self.play(suite, part, EXPECTED_OF[place])
        other = self.play(suite, part, place)
        return [
            each
            for each in found
            if expected.get(each.test, "nothing") != other.get(each.test, "nothing")
        ]


def differences(place: str, part: str, expected: Result, found: Result) -> list[Difference]:
    one, other = expected.outcomes[part], found.outcomes[part]
    return [
        Difference(place, part, test, one.get(test, "nothing"), other.get(test, "nothing"))
        for test in sorted({*one, *other})
        if one.get(test) != other.get(test)
    ]


@contextlib.contextmanager
def ground(*, store_bytes: int = STORE_BYTES) -> Iterator[Ground]:
    with contextlib.ExitStack() as stack:
        below = fast_directory()
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=below)))
        scratch.chmod(0o755)
        huge = stack.enter_context(large_pages(store_bytes + 64 * MIB))
        place = stack.enter_context(workplace(size_bytes=store_bytes, below=huge))
        place.announced.append(r"reverted: the previous version is back: the writer was killed")
        place.mount()
        yield Ground(place, scratch)
