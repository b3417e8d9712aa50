"""Kills of programs that store file data by themselves, of their daemon, and of both.

| kind | at work | what is killed |
|---|---|---|
| direct-writer | three savers through ``cxlfs.client``, some files by three threads | they |
| direct-daemon | two of these and two that hang in the middle of a copy | the daemon; they go on |
| direct-both | two savers | a saver and the daemon, within 5 ms of each other |
| direct-stopped | a saver, which is stopped, and loses its file; then it wakes up | the saver |

Room that anybody may still store into must not be given to others: so these fill the store in the
meantime, and every file is compared before and behind the end of those that go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cxlfs.control.client import control_request
from tests.support import saver
from tests.support.direct_saver import HUNG, HUNG_PATTERN
from tests.support.kill_campaign import (
    ERRORS_OF_A_DEAD_MOUNT,
    GIVEN_UP,
    REVERTED,
    Campaign,
    Outcome,
    run_campaign,
)
from tests.support.kill_model import Checkpoints, Ledger, Model, Process
from tests.support.mount import MIB, wait_until

PROGRAM = "tests.support.direct_saver"
DIRECT_KINDS = {
    "direct-writer": ("direct", "direct-small", "direct-shards"),
    "direct-daemon": ("direct", "direct-shards"),
    "direct-both": ("direct", "direct-shards"),
    "direct-stopped": ("direct", "direct-shards"),
}
"""The roles of the savers at work."""
HUNG_COUNT = 2
SAVE_SECONDS_MAX = 0.06
COPY_SECONDS_MAX = 0.015
PAUSE_MS = 4
APART_SECONDS_MAX = 0.005
WITH_ROOM_SHARE = 0.7
"""So many instants are counted from one on at which a program has room; the others may be any."""
SLIPS_BYTES_MAX = 128 * saver.KIB
"""More than this waits only for somebody who was stopped while he stored."""
FILLER = "filler"
MARGIN_BYTES = 32 * MIB
"""What the filler leaves free: enough for those that save beside it to go on, in part."""
ROOM_BYTES = 6 * MIB
"""Room may differ by this behind a kill: rests of extents and journals. Lost leases add up."""


class DirectCampaign(Campaign):
    """See the module."""

    store_bytes = 224 * MIB
    announced = (REVERTED, GIVEN_UP, "no-space", r"reverted: .* a write failed \(no room")

    def _make_models(self) -> list[Model]:
        place, kind = self.place, self.outcome.kind
        self.savers = [
            Checkpoints(place.mountpoint, self.seed, role, PROGRAM) for role in DIRECT_KINDS[kind]
        ]
        self.hung = {
            HUNG_PATTERN.format(number): saver.content(self.seed, "truncate", number + 1)
            for number in range(HUNG_COUNT)
        }
        for name, data in self.hung.items():
            (place.mountpoint / name).write_bytes(data)
        self.room_bytes = self._measure_room()
        return [*self.savers]

    # --- one round ------------------------------------------------------------------------------

    def _work_and_kill(self, kills_max: int) -> None:
        rounds: dict[str, Callable[[], int]] = {
            "direct-writer": lambda: self._kill_writers(kills_max),
            "direct-daemon": self._kill_daemon_under_survivors,
            "direct-both": self._kill_both,
            "direct-stopped": self._stop_and_wake,
        }
        self.outcome.kills += rounds[self.outcome.kind]()
        self._compare("at the end of a round", self.savers)
        self._expect_room()

    def _kill_writers(self, kills_max: int) -> int:
        models = self.savers[:kills_max]
        with self._started(models) as processes:
            self._wait_for_saves(processes)
            for process in self.random.sample(processes, len(processes)):
                time.sleep(self.random.uniform(0, SAVE_SECONDS_MAX))
                os.kill(process.pid, signal.SIGKILL)
            ledgers = [process.wait() for process in processes]
        self._judge_each(models, ledgers)
        return len(models)

    def _kill_daemon_under_survivors(self) -> int:
        fast = self.random.random() < 0.3
        options = [0 if fast else PAUSE_MS, "on"]
        with self._started(self.savers, *options) as processes, self._hung() as hung:
            self._wait_for_saves(processes)
            time.sleep(self.random.uniform(0, SAVE_SECONDS_MAX))
            self._kill_daemon(self._pid)
            early = self.random.random() < 0.5
            if early:
                self._wake(hung)
            self._mount_again(1)
            if not early:
                self._wake(hung)
            assert self._direct()["segments_held"] > 0, "nothing is held for survivors"
            # They go on storing; nothing of them can be published on this mount.
            self._judge_each(self.savers, [dataclasses.replace(p.ledger) for p in processes])
            self._work_beside()
            assert self._direct()["segments_held"] > 0, "what survivors have is not held"
            for process in self.random.sample([*processes, *hung], len(processes) + len(hung)):
                os.kill(process.pid, signal.SIGKILL)
            ledgers = [process.wait() for process in processes]
        for ledger in ledgers:
            seen = ledger.error is None or ledger.error in ERRORS_OF_A_DEAD_MOUNT
            assert seen, f"a survivor was told: {os.strerror(ledger.error or 0)}"
            self.outcome.errors_seen += ledger.error is not None
        return 1

    def _kill_both(self) -> int:
        with self._started(self.savers) as processes:
            self._wait_for_saves(processes)
            time.sleep(self.random.uniform(0, SAVE_SECONDS_MAX))
            victim = self.random.choice(processes)
            apart_seconds = self.random.uniform(0, APART_SECONDS_MAX)
            if self.random.random() < 0.5:
                self.outcome.note("killed before its writer")
                os.kill(self._pid, signal.SIGKILL)
                time.sleep(apart_seconds)
                os.kill(victim.pid, signal.SIGKILL)
            else:
                self.outcome.note("killed behind its writer")
                os.kill(victim.pid, signal.SIGKILL)
                time.sleep(apart_seconds)
            with contextlib.suppress(ProcessLookupError):
                self._kill_daemon(self._pid)
            self.place.ends_clean = False
            ledgers = [process.wait() for process in processes]
        self._mount_again(1)
        self._judge_each(self.savers, ledgers)
        return 2

    def _stop_and_wake(self) -> int:
        model, others = self.savers[0], self.savers[1:]
        with self._started([model]) as (process,):
            self._wait_for_saves([process])
            time.sleep(self.random.uniform(0, COPY_SECONDS_MAX))
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: _state(process.pid) == "T", "it is stopped")
            time.sleep(0.01)  # for its listener: what it has said lies in the pipe
            ledger = dataclasses.replace(process.ledger)
            taken = self._take_file(model)
            self._work_beside()
            direct = self._direct()
            moment = "with room" if direct["files"] else "without room"
            if direct["apart_bytes"]:
                mid_copy = direct["apart_bytes"] > SLIPS_BYTES_MAX
                moment = "in mid-copy" if mid_copy else "between copies"
            self.outcome.note(moment)
            os.kill(process.pid, signal.SIGCONT)
            in_flight = ledger.begun > ledger.saved
            if in_flight:
                wait_until(
                    lambda: process.ledger.saved > ledger.saved or process.ledger.error is not None,
                    "it goes on",
                )
            time.sleep(self.random.uniform(0, SAVE_SECONDS_MAX))
            os.kill(process.pid, signal.SIGKILL)
            last = process.wait()
        assert last.error in (None, errno.ENOENT), os.strerror(last.error or 0)
        self._judge_woken(model, ledger, last, taken)
        for each in others:
            assert (problem := each.check()) is None, problem
        return 1

    # --- somebody else's work -------------------------------------------------------------------

    def _take_file(self, model: Checkpoints) -> bytes | None:
        """Somebody else takes away, replaces or truncates what is being written."""
        final = self.place.mountpoint / saver.name(self.seed, model.role, 1)
        names = [final, final.with_name(f"{final.name}.tmp")]
        action = self.random.choice(["remove", "replace", "truncate"])
        self.outcome.note(action)
        data = saver.content(self.seed, "truncate", self.random.randrange(1, 1000))
        for name in names:
            if not name.exists():
                continue
            if action == "remove":
                name.unlink()
            elif action == "truncate":
                name.write_bytes(data)
            else:
                other = name.with_name("other")
                other.write_bytes(data)
                other.rename(name)
        return {"remove": b"", "replace": data, "truncate": None}[action]

    def _judge_woken(
        self, model: Checkpoints, before: Ledger, last: Ledger, taken: bytes | None
    ) -> None:
        """Its file is what others made of it, or what it wrote. Then it is made anew."""
        final = self.place.mountpoint / saver.name(self.seed, model.role, 1)
        versions = range(before.saved + 1, last.begun + 1)
        written = [saver.content(self.seed, model.role, version) for version in versions]
        if taken is not None:
            wait_until(
                lambda: _content(final) in [taken, *written] or _is_part(final, written[-1:]),
                "the file is what somebody wrote",
            )
        self.outcome.saves += last.saved - before.saved
        self.outcome.in_flight += before.begun > before.saved
        self.outcome.old += last.error is not None or last.saved == before.saved
        self.outcome.new += last.error is None and last.saved > before.saved
        for name in (final, final.with_name(f"{final.name}.tmp")):
            name.unlink(missing_ok=True)
        model.version = last.begun + 1
        data = saver.content(self.seed, model.role, model.version)
        saver.save(self.place.mountpoint, self.seed, model.role, model.version, data)
        model.versions[final.name] = model.version

    def _work_beside(self) -> None:
        """Another program saves by itself, and the rest is filled through the kernel, and compared;
        once more, so that what was freed is used too.
        """
        directory = self.place.mountpoint
        beside = Checkpoints(directory, self.seed, "direct-small", PROGRAM)
        with self._started([beside]) as (process,):
            process.wait_until_begun(2 + self.random.randrange(4))
            for _ in range(2):
                self._fill_and_compare()
            os.kill(process.pid, signal.SIGKILL)
            ledger = process.wait()
        if ledger.error not in (None, errno.ENOSPC):
            raise AssertionError(f"beside: {os.strerror(ledger.error or 0)}")
        problem = beside.judge(ledger).problem
        assert problem is None, problem
        self._compare("beside survivors", self.savers[self.outcome.kind == "direct-stopped" :])
        for name in beside.versions:
            for each in (directory / name, directory / f"{name}.tmp"):
                each.unlink(missing_ok=True)

    def _fill_and_compare(self) -> None:
        path = self.place.mountpoint / FILLER
        piece = self.random.randbytes(MIB)
        report = os.statvfs(self.place.mountpoint)
        count = max(report.f_bavail * report.f_frsize - MARGIN_BYTES, 0) // MIB
        try:
            with path.open("wb", buffering=0) as stream:
                for number in range(count):
                    stream.write(bytes([number % 256]) + piece[1:])
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as stream:
            for number in range(path.stat().st_size // MIB):
                assert stream.read(MIB) == bytes([number % 256]) + piece[1:], f"filler {number}"
        path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _started(self, models: Sequence[Checkpoints], *options: object) -> Iterator[list[Process]]:
        processes: list[Process] = []
        try:
            processes.extend(model.start(*options) for model in models)
            yield processes
        finally:
            for process in processes:
                process.end()

    @contextlib.contextmanager
    def _hung(self) -> Iterator[list[Process]]:
        processes: list[Process] = []
        directory = self.place.mountpoint
        try:
            for number in range(HUNG_COUNT):
                ledger = Ledger(saved=0, begun=0)
                processes.append(Process([directory, self.seed, HUNG, number], ledger, PROGRAM))
            for process in processes:
                process.wait_until_begun(1)
            yield processes
        finally:
            for process in processes:
                process.end()

    @staticmethod
    def _wake(processes: list[Process]) -> None:
        for process in processes:
            process.tell("go")

    def _wait_for_saves(self, processes: list[Process]) -> None:
        for process in processes:
            process.wait_until_begun(1)
        self.random.choice(processes).wait_until_begun(1 + self.random.randrange(3))
        if self.random.random() < WITH_ROOM_SHARE:
            wait_until(lambda: self._direct()["files"] > 0, "a program has room", 0.001)

    # --- comparing --------------------------------------------------------------------------------

    def _judge_each(self, models: list[Checkpoints], ledgers: list[Ledger]) -> None:
        everybody, self.models = self.models, [*models]
        self._judge(ledgers)
        self.models = everybody

    def _compare(self, when: str, models: list[Checkpoints]) -> None:
        for model in models:
            if (problem := model.check()) is not None:
                self.outcome.problems.append(f"{when}: {model.role}: {problem}")
        for name, data in self.hung.items():
            path = self.place.mountpoint / name
            if _content(path) != data:
                self.outcome.problems.append(f"{when}: {name} is not what it was")

    def _direct(self) -> dict[str, int]:
        for message in control_request(str(self.place.mountpoint), "status"):
            return dict(message["direct"])  # type: ignore[call-overload]
        raise AssertionError("no answer")

    def _measure_room(self) -> int:
        """Free and used by content. Of nobody else."""
        directory = self.place.mountpoint
        for temporary in directory.glob("*.tmp"):
            temporary.unlink()
        wait_until(self._is_at_rest, "all room has come back")
        report = os.statvfs(directory)
        used = sum(-(-each.stat().st_size // 4096) * 4096 for each in directory.iterdir())
        return report.f_bfree * report.f_frsize + used

    def _is_at_rest(self) -> bool:
        direct = self._direct()
        return not any(direct[name] for name in ("files", "apart_bytes", "segments_held"))

    def _expect_room(self) -> None:
        wait_until(
            lambda: abs(self._measure_room() - self.room_bytes) < ROOM_BYTES,
            f"there are {self.room_bytes} bytes again, not {self._measure_room()}",
        )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        return f"<{error}>".encode()


def _is_part(path: Path, contents: list[bytes]) -> bool:
    """A new file whose writer was killed: what it has is of that content, the rest holes."""
    try:
        if os.getxattr(path, "user.cxlfs.state") != b"incomplete":
            return False
        found = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError:
        return False
    whole = np.frombuffer(b"".join(contents), np.uint8)
    size = min(len(found), len(whole))
    return size == len(found) and bool(((found == whole[:size]) | (found == 0)).all())


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def run_direct_campaign(
    kind: str, kills: int, seed: int, say: Callable[[str], None] = lambda _line: None
) -> Outcome:
    """As ``run_campaign``, of one of ``DIRECT_KINDS``."""
    return run_campaign(kind, kills, seed, say, campaign=DirectCampaign)
