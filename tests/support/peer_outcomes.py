"""What a suite of other people said, test by test: counted, described, compared with another run.

Never here: how a suite runs (``peers``).

Invariants
- What is expected to differ is named in KNOWN with its reason, and is still counted.
- A suite of which nothing can be counted has not run: that is an error, and no success.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cxlfs.units import format_size


class PeerError(Exception):
    """A suite cannot be run; the message says why."""


@dataclasses.dataclass
class Outcome:
    """Counts, and the names of what failed and of what was skipped."""

    suite: str
    passed: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    results: dict[str, str] = dataclasses.field(default_factory=dict)
    """What became of each test, where the suite names them, in the words of the suite."""
    stored_directly: dict[str, int] = dataclasses.field(default_factory=dict)
    """Under ``cxlfs run``: bytes, of each test or of all of the suite."""
    seconds: float = 0.0
    verify: str = "not verified"

    def add(self, name: str, result: str) -> None:
        """One test more: "passed", "skipped", or whatever else, which is a failure."""
        self.results[name] = result
        if result == "passed":
            self.passed += 1
        elif result == "skipped":
            self.skipped.append(name)
        else:
            self.failed.append(name)

    def unexpected(self) -> list[str]:
        return [name for name in self.failed if name not in KNOWN.get(self.suite, {})]


KNOWN: dict[str, dict[str, str]] = {
    "xfstests": {
        "generic/003": "access times are not kept: no read is a write to the media",
        "generic/192": "access times are not kept",
        "generic/285": "data begins where its 4 KiB block does; the suite took 2 bytes for a unit",
        "generic/346": "write(2) beside a mapped change of the page: one may be lost (see below)",
        "generic/394": "as generic/564",
        "generic/426": "file handles do not outlive the kernel's inode: a mount is not for export",
        "generic/445": "as generic/285",
        "generic/467": "as generic/426",
        "generic/477": "as generic/426",
        "generic/490": "with 2 bytes for a unit the suite looks behind the end of its file",
        "generic/564": "the suite lifts a limit on file sizes, which needs CAP_SYS_RESOURCE",
        "generic/732": "one place at a time: `mount --bind` shows a store in others",
        "generic/756": "as generic/426",
        "generic/777": "as generic/426",
    }
}
"""What differs and is meant to, by suite and test; docs/posix.md says the same."""


def count_prove(text: str) -> Outcome:
    """Of the summary that prove prints; each test of a file counts by itself."""
    total = re.search(r"^Files=(\d+), Tests=(\d+)", text, re.MULTILINE)
    if total is None:
        raise PeerError(f"prove says no summary: {text[-500:]}")
    failed = [
        f"{'/'.join(Path(file).parts[-2:])}:{number}"
        for file, rest in re.findall(r"^(\S+\.t)\s+\(Wstat.*\n((?:\s+.*\n)*)", text, re.MULTILINE)
        for numbers in re.findall(r"Failed tests?:((?:[\s\d,-]|\n)+)", rest)
        for number in _numbers(numbers)
    ]
    return Outcome(
        "pjdfstest", int(total[2]) - len(failed), failed, results=dict(_lines_of_prove(text))
    )


def _lines_of_prove(text: str) -> Iterator[tuple[str, str]]:
    """Of its verbose output: each test, whether it is ok, and what it says of itself."""
    file = ""
    for line in text.splitlines():
        header = re.fullmatch(r"(\S+\.t) \.+ *", line)
        if header is not None:
            file = "/".join(Path(header[1]).parts[-2:])
        found = re.match(r"((?:not )?ok) (\d+)(?: .*?# *(\w+))?", line)
        if found is not None:
            yield f"{file}:{found[2]}", " ".join(filter(None, (found[1], found[3])))


def _numbers(text: str) -> Iterator[int]:
    """Of ``3, 5-7``."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def count_check(text: str) -> Outcome:
    """Of what ``check`` prints at its end."""

    def names(word: str) -> list[str]:
        found = re.search(rf"^{word}: (.*)$", text, re.MULTILINE)
        return found[1].split() if found else []

    ran, skipped, failed = names("Ran"), names("Not run"), names("Failures")
    if not ran:
        raise PeerError(f"check ran nothing: {text[-500:]}")
    outcome = Outcome("xfstests")
    for name in dict.fromkeys(ran):
        outcome.add(
            name, "failed" if name in failed else "skipped" if name in skipped else "passed"
        )
    return outcome


def sort_stressor(text: str) -> str:
    """By its last words; a skipped one is successful too."""
    if "unsuccessful run" in text or re.search(r"stress-ng: fail:", text):
        return "failed"
    if re.search(r"skipping stressor|skipped:\s*[1-9]", text):
        return "skipped"
    return "passed" if "successful run completed" in text else "failed"


def differences(outcome: Outcome, earlier: Mapping[str, Any]) -> Iterator[str]:
    """What became of a test otherwise than in an earlier run (what ``--json`` wrote). Raises
    PeerError when that is of another suite.
    """
    before = earlier.get("results")
    if earlier.get("suite") != outcome.suite or not isinstance(before, dict):
        raise PeerError(f"the other run is none of {outcome.suite}")
    for name in sorted(before.keys() | outcome.results.keys()):
        here, there = (str(each.get(name, "not run")) for each in (outcome.results, before))
        if here != there:
            yield f"{name}: {here}, and {there} in the other run"


def describe(outcome: Outcome) -> Iterable[str]:
    known = KNOWN.get(outcome.suite, {})
    for name in outcome.failed:
        yield f"FAILED {name}" if name not in known else f"differs {name}: {known[name]}"
    yield (
        f"{outcome.suite}: {outcome.passed} passed, {len(outcome.failed)} failed or differ "
        f"({len(outcome.unexpected())} not expected), {len(outcome.skipped)} skipped, "
        f"{outcome.seconds:.0f} s; the store afterwards: {outcome.verify}"
    )
    moved = outcome.stored_directly
    if moved:
        yield (
            f"stored directly: {format_size(sum(moved.values()))}, by "
            f"{sum(map(bool, moved.values()))} of {len(moved)}"
        )
