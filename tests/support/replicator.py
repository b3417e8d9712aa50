"""A stand-in for the service that Orbax's multi-tier checkpoints expect on each node: as much of it
as lets a job begin, and all nodes go on from one step. It copies nothing.

The protocol, in the directory that the job of a node saves to:

- ``jax-init-info.txt``, before the job asks: the number of its process, and the coordinator;
- the job renames ``replicator.yaml`` into place; that it is removed means: understood. What went
  wrong with that is in ``replicator.errors``, or ``replicator.failed``, before that;
- then ``{job}-s{step}-n{node}-w{worker}.restore`` has to come: a symbolic link to a step's
  directory, which the job renames to the number of the step (so that nothing may be there, and no
  later step either), or an empty file with step 0: nothing to restore.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

POLL_SECONDS = 0.05
_KEYS = (
    "job-name",
    "framework",
    "assume-data-parallelism",
    "node-rank",
    "nodes",
    "peer-ranks",
)
HELD = ".held"


class Replicators:
    """One for each node's directory. ``failure``: what all of them say is wrong."""

    def __init__(self, directories: Sequence[Path], port: int, failure: str = "") -> None:
        self._directories = directories
        self._failure = failure
        self._ended = threading.Event()
        self.problems: list[str] = []
        self.chosen: int | None = None
        for rank, directory in enumerate(directories):
            directory.mkdir(exist_ok=True)
            (directory / "jax-init-info.txt").write_text(f"{rank}\n127.0.0.1:{port}\n")
            (directory / "replicator.yaml").unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        waiting = dict(enumerate(self._directories))
        jobs: dict[int, str] = {}
        while waiting and not self._ended.wait(POLL_SECONDS):
            for rank, directory in list(waiting.items()):
                if (directory / "replicator.yaml").exists():
                    jobs[rank] = self._read(directory / "replicator.yaml", rank)
                    del waiting[rank]
        if not waiting:
            self._answer(jobs)

    def _read(self, path: Path, rank: int) -> str:
        """The name of the job."""
        pairs = [line.partition(": ")[::2] for line in path.read_text().splitlines()]
        found = dict(pairs)
        others = [each for each in range(len(self._directories)) if each != rank]
        wanted = {
            "framework": "orbax",
            "node-rank": str(rank),
            "nodes": str(len(self._directories)),
            "peer-ranks": str(others),
        }
        if [key for key, _ in pairs][:-1] != list(_KEYS):
            self.problems.append(f"keys: {pairs}")
        if not re.fullmatch(r"backup-interval-(minutes|steps)", pairs[-1][0]):
            self.problems.append(f"interval: {pairs[-1]}")
        self.problems += [f"{key}: {found.get(key)}" for key in wanted if found[key] != wanted[key]]
        return found["job-name"]

    def _answer(self, jobs: dict[int, str]) -> None:
        steps = [whole_steps(directory) for directory in self._directories]
        self.chosen = max(set.intersection(*steps), default=None)
        for rank, directory in enumerate(self._directories):
            if self._failure:
                (directory / "replicator.failed").write_text(self._failure)
            step = 0 if self.chosen is None else self.chosen
            marker = directory / f"{jobs[rank]}-s{step}-n{rank}-w0.restore"
            if self.chosen is None:
                marker.touch()
            else:
                for later in [each for each in steps[rank] if each >= step]:
                    self._hold(directory, later)
                marker.symlink_to(f"{HELD}/{step}")
            (directory / "replicator.yaml").unlink()

    @staticmethod
    def _hold(directory: Path, step: int) -> None:
        """Out of the job's sight; a link that it was given before is taken away alone."""
        (directory / HELD).mkdir(exist_ok=True)
        path = directory / str(step)
        if path.is_symlink():
            path.unlink()
        else:
            path.rename(directory / HELD / str(step))


def whole_steps(directory: Path) -> set[int]:
    """What Orbax has finished: it writes beside the name, and renames."""
    return {
        int(path.name)
        for path in directory.iterdir()
        if path.name.isdigit() and (path / "commit_success.txt").exists()
    }
