"""Savers at work under SIGKILLs, of a writer or of the daemon, and every file compared each time.

| kind | at work | what is killed |
|---|---|---|
| writer | one saver, which truncates or renames | the saver |
| daemon | the same | the daemon |
| several | three savers: O_TRUNC, temporary name and rename, a log with fsync | the daemon |
| mount | the same, until the daemon is killed | then one to three daemons in a row that mount |
| cleaner | shards, which keep the store nearly full; O_TRUNC; a log | the daemon that cleans |

``kill_model`` says what each file may be. ``scripts/kill-test`` runs it long,
``tests/mounted/test_kills.py`` short. All is determined by the seed except the instants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cxlfs.control import mountinfo
from cxlfs.errors import CxlfsError, MountError
from tests.support import saver
from tests.support.cli import run_program
from tests.support.daemon_log import CLEANING, MOUNTING, NEITHER, STARTING, DaemonLog
from tests.support.kill_model import Checkpoints, Ledger, Log, Model, Process
from tests.support.mount import PATIENCE_SECONDS, Workplace, wait_for_exit, workplace

STORE_BYTES = 128 * saver.MIB
ERRORS_OF_A_DEAD_MOUNT = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
"""Afterwards, waiting for an answer, and while the request was being handed to the dying daemon."""
SAVE_SECONDS_MAX = 0.03
"""Kills come at a random time up to this after a save began: about as long as the longest takes."""
CLEANING_SECONDS_MAX = 0.003
"""The same after the cleaner or a rollover began."""
MOUNT_KILLS_MAX = 3
MOUNTING_INSTANTS = (
    (None, 0.4),
    (" opening ", 0.05),
    ("rolling over to", 0.003),
    ("process protection", 0.03),
    (" mounted ", 0.004),
)
"""From what line of its log on, and up to how many seconds later, a mounting daemon is killed."""
REVERTED = r"reverted: the previous version is back: the writer was killed"
GIVEN_UP = "given-up: the version before"

ROLES_OF_SEVERAL = ("truncate", "rename", saver.LOG)
KINDS = {
    "writer": ("mixed",),
    "daemon": ("mixed",),
    "several": ROLES_OF_SEVERAL,
    "mount": ROLES_OF_SEVERAL,
    "cleaner": ("shards", "truncate", saver.LOG),
}
"""The roles of the savers at work."""
_WATCHED = ("mount", "cleaner")


@dataclasses.dataclass(slots=True)
class Outcome:
    """Counts of one campaign. ``in_flight``: savers that a kill met in mid-save; ``old`` and
    ``new`` say which version was there then, ``between`` counts savers met between two saves.
    """

    kind: str
    kills: int = 0
    saves: int = 0
    in_flight: int = 0
    old: int = 0
    new: int = 0
    between: int = 0
    errors_seen: int = 0
    """Saves that failed with an error, as they must when the daemon is killed."""
    moments: dict[str, int] = dataclasses.field(default_factory=dict)
    """What the daemon was doing when it was killed, where that is known."""
    verified: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)

    def note(self, moment: str) -> None:
        self.moments[moment] = self.moments.get(moment, 0) + 1


class Campaign:
    """One mounted store, one seed; fills ``outcome``. ``say`` gets a line now and then."""

    store_bytes = STORE_BYTES
    announced: tuple[str, ...] = (REVERTED, GIVEN_UP)

    def __init__(
        self, place: Workplace, outcome: Outcome, seed: int, say: Callable[[str], None]
    ) -> None:
        self.place = place
        self.outcome = outcome
        self.random = random.Random(f"{outcome.kind} {seed}")
        self.say = say
        self.log = DaemonLog(place.log)
        self.seed = seed
        self._pid = 0
        self._mount()
        self.models: list[Model] = self._make_models()

    def _make_models(self) -> list[Model]:
        place, seed = self.place, self.seed
        return [
            Log(place.mountpoint, seed)
            if role == saver.LOG
            else Checkpoints(place.mountpoint, seed, role)
            for role in KINDS[self.outcome.kind]
        ]

    def run(self, kills: int) -> None:
        """So many kills, or until something is not as promised; then verify."""
        outcome = self.outcome
        said = 0
        while outcome.kills < kills and not outcome.problems:
            where = f"{outcome.kind} kill {outcome.kills + 1}"
            try:
                self._work_and_kill(kills - outcome.kills)
            except (AssertionError, OSError, CxlfsError) as error:
                outcome.problems.append(f"{type(error).__name__}: {error}")
            if outcome.problems:
                command = f"scripts/kill-test --{outcome.kind}-kills {kills} --seed {self.seed}"
                outcome.problems.append(f"{where}; to repeat: {command}")
            elif outcome.kills // 100 > said:
                said = outcome.kills // 100
                self.say(
                    f"{outcome.kills} {outcome.kind} kills, {outcome.old} old, {outcome.new} new"
                )
        self._verify()

    def _verify(self) -> None:
        try:
            self.place.unmount()
            self.place.ends_clean = True
        except CxlfsError as error:
            self.outcome.problems.append(f"unmounting: {error.message}")
        verified = run_program("verify", self.place.source)
        self.outcome.verified = verified.code == 0
        if verified.code != 0:
            self.outcome.problems.append(f"verify exits {verified.code}:\n{verified.stdout}")

    # --- one kill, or the kills of one mount ------------------------------------------------

    def _work_and_kill(self, kills_max: int) -> None:
        outcome = self.outcome
        processes: list[Process] = []
        try:
            processes.extend(model.start() for model in self.models)
            self._let_work(processes)
            if outcome.kind == "writer":
                os.kill(processes[0].pid, signal.SIGKILL)
            else:
                self._kill_daemon(self._pid)
            ledgers = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.end()
        if outcome.kind != "writer":
            self._mount_again(kills_max)
        outcome.kills += outcome.kind != "mount"
        self._judge(ledgers)

    def _let_work(self, processes: list[Process]) -> None:
        for process in processes:
            process.wait_until_begun(1)
        self.random.choice(processes).wait_until_begun(1 + self.random.randrange(3))
        delay = self.random.uniform(0, SAVE_SECONDS_MAX)
        # One in four comes at any time: instants behind a line of the log are not all there are.
        if self.outcome.kind == "cleaner" and self.random.randrange(4):
            begun = "compacting segment", "rolling over to"
            position = self.log.size_bytes
            assert self.log.wait_for(*begun, position=position), "nothing is cleaned"
            delay *= CLEANING_SECONDS_MAX / SAVE_SECONDS_MAX
        time.sleep(delay)

    def _kill_daemon(self, pid: int) -> None:
        """SIGKILL, as the OOM killer would; the mount is dead afterwards."""
        watch = os.pidfd_open(pid)
        self.place.ends_clean = False
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(watch)

    def _mount_again(self, kills_max: int) -> None:
        self._expect_dead_mount()
        if self.outcome.kind == "cleaner":
            self.outcome.note(self.log.last(CLEANING, NEITHER))
        if self.outcome.kind == "mount":
            for _ in range(min(self.random.randint(1, MOUNT_KILLS_MAX), kills_max)):
                self._clear_log()
                self._kill_while_mounting()
                self.outcome.kills += 1
        self._clear_log()
        self._mount()

    def _mount(self) -> None:
        self.place.mount(*self._options)
        self._pid = self.place.daemon_pid

    @property
    def _options(self) -> list[str]:
        return ["debug"] if self.outcome.kind in _WATCHED else []

    def _kill_while_mounting(self) -> None:
        words, seconds_max = self.random.choice(MOUNTING_INSTANTS)
        delay = self.random.uniform(0, seconds_max)
        with ThreadPoolExecutor(1) as pool:
            mounting = pool.submit(self.place.mount, *self._options)
            pid = await_daemon(self.place.mountpoint)
            if words is not None:
                assert self.log.wait_for(words, position=0), "it does not mount"
            time.sleep(delay)
            self._kill_daemon(pid)
            error = mounting.exception(PATIENCE_SECONDS)
        if error is None:
            moment = "after it answered"
        elif isinstance(error, MountError) and "the daemon ended before" in error.message:
            moment = self.log.last(MOUNTING, STARTING)
        else:
            raise error
        self.outcome.note(moment)
        if self.place.is_mounted:
            self._expect_dead_mount()

    def _clear_log(self) -> None:
        """What a daemon has said must not be loud; it stays when it was."""
        self.place.assert_quiet_log()
        self.log.clear()

    def _expect_dead_mount(self) -> None:
        """A dead mount point says so: it never looks empty, and it does not hang."""
        mountpoint = self.place.mountpoint
        assert mountinfo.is_dead(str(mountpoint)), "the mount of a dead daemon answers, or hangs"
        with contextlib.suppress(OSError):
            raise AssertionError(f"a dead mount shows {list(mountpoint.iterdir())}")

    # --- comparing --------------------------------------------------------------------------

    def _judge(self, ledgers: list[Ledger]) -> None:
        outcome = self.outcome
        for model, ledger in zip(self.models, ledgers, strict=True):
            if ledger.error is not None:
                outcome.errors_seen += 1
                if outcome.kind == "writer" or ledger.error not in ERRORS_OF_A_DEAD_MOUNT:
                    text = os.strerror(ledger.error)
                    outcome.problems.append(f"a save ({model.role}) failed: {text}")
                    continue
            outcome.saves += model.progress(ledger)
            verdict = model.judge(ledger)
            if verdict.problem is not None:
                outcome.problems.append(f"{model.role}: {verdict.problem}")
            elif verdict.was_new is None:
                outcome.between += 1
            else:
                outcome.in_flight += 1
                outcome.new += verdict.was_new
                outcome.old += not verdict.was_new


def await_daemon(mountpoint: Path) -> int:
    """The process that is going to serve ``mountpoint``, as soon as it has left its launcher."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                ours = b"cxlfs.daemon.start" in words and os.fsencode(mountpoint) in words
                pid = int(process.name)
                # The launcher leads the session that the daemon is in.
                if ours and os.getsid(pid) != pid:
                    return pid
        time.sleep(0.001)
    raise AssertionError("no daemon was started")


class _ProblemsError(Exception):
    """The checks at the end of a workplace would only say once more that something is wrong."""


def run_campaign(
    kind: str,
    kills: int,
    seed: int,
    say: Callable[[str], None] = lambda _line: None,
    *,
    campaign: type[Campaign] = Campaign,
) -> Outcome:
    """A campaign on a store of its own, cleaned up behind it; the daemon's log is a problem's."""
    outcome = Outcome(kind)
    with (
        contextlib.suppress(_ProblemsError),
        contextlib.redirect_stdout(io.StringIO()),  # where a workplace shows its log in the end
        workplace(size_bytes=campaign.store_bytes) as place,
    ):
        place.announced.extend(campaign.announced)
        place.starts_afresh = kind == "mount"  # it is killed while it starts
        campaign(place, outcome, seed, say).run(kills)
        if outcome.problems:
            outcome.problems.append(place.log_text())
            raise _ProblemsError
    return outcome
