"""The demo proper; scripts/demo prepares what it needs and runs it.

It only uses what every user has: the command ``cxlfs``, an ordinary training script, and kill.

Exit status: 0 everything was as promised; 1 something was not, or could not be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

BIN = Path(sys.executable).parent
TRAINER = Path(__file__).with_name("demo_train.py")
ROOT_MOUNTPOINT = Path("/mnt/cxlckpt")
STEPS = 60
PATIENCE_SECONDS = 120.0
TRAINER_DIES_AT, DAEMON_DIES_AT, TOO_LATE = 0.6, 0.3, 0.95
"""How much of the new checkpoint has been written when a kill comes."""
DYING = {errno.ECONNABORTED, errno.EIO}
"""What a request gets that was under way when the daemon ended."""
ROOM_BYTES = 1 << 28
MB = 1e6


class DemoError(Exception):
    """Something was not as promised, or could not be tried."""


def say(text: str = "") -> None:
    print(text, flush=True)


def headline(text: str) -> None:
    say(f"\n== {text}")


def require(condition: bool, what: str) -> None:  # noqa: FBT001  reads as a sentence
    if not condition:
        raise DemoError(what)


def command(*arguments: object, quiet: bool = False) -> str:
    """Run ``cxlfs ARGUMENTS`` and show it as typed; returns what it printed."""
    text = [str(argument) for argument in arguments]
    if not quiet:
        say(f"$ cxlfs {' '.join(text)}")
    done = subprocess.run([BIN / "cxlfs", *text], capture_output=True, text=True, check=False)
    if not quiet:
        say((done.stdout + done.stderr).rstrip("\n"))
    require(done.returncode == 0, f"cxlfs {text[0]} failed: {done.stderr.strip()}")
    return done.stdout


class Demo:
    """One run: its directories, the trainer, and what was seen."""

    def __init__(self, work: Path, mountpoint: Path, size: str) -> None:
        self.work = work
        self.source = work / "store.cxlfs"
        self.mountpoint = mountpoint
        self.checkpoint = mountpoint / "model.pt"
        self.ledger = work / "ledger"
        self.size = size
        self._trainer: subprocess.Popen[str] | None = None
        self.proven: list[str] = []

    # --- the steps --------------------------------------------------------------------------

    def run(self) -> None:
        began = time.monotonic()
        headline(f"1. Make a store in a file of {self.size}, and mount it")
        command("mkfs", self.source, "--size", self.size, "--label", "demo")
        command("mount", self.source, self.mountpoint)
        headline("2. Train; kill the trainer (SIGKILL) while torch.save overwrites the checkpoint")
        written, full = self.train_until_mid_save(3, TRAINER_DIES_AT)
        self.kill_trainer(written, full)
        headline("3. Resume; kill the daemon (SIGKILL) in mid-save")
        written, full = self.train_until_mid_save(3, DAEMON_DIES_AT)
        self.kill_daemon(written, full)
        headline("4. Resume, and train to the end")
        final = self.train_to_the_end()
        headline("5. The same training again, without a store, a save or a kill")
        self.compare_with_undisturbed(final)
        headline("6. Verify and unmount")
        command("list", self.mountpoint)
        command("umount", self.mountpoint)
        command("verify", self.source)
        self.proven.append("cxlfs verify finds nothing wrong")
        self.summary(time.monotonic() - began, full)

    def kill_trainer(self, written: int, full: int) -> None:
        self.trainer.kill()
        self.trainer.wait()
        say(f"killed the trainer with {written / MB:.0f} of {full / MB:.0f} MB written")
        step = self.check_checkpoint()
        command("list", self.mountpoint)
        self.proven.append(
            f"trainer killed with {written / MB:.0f} of {full / MB:.0f} MB of the overwrite "
            f"written: step {step} loads, bit for bit"
        )

    def kill_daemon(self, written: int, full: int) -> None:
        status = json.loads(command("status", self.mountpoint, "--json", quiet=True))
        os.kill(status["pid"], signal.SIGKILL)
        say(f"killed the daemon with {written / MB:.0f} of {full / MB:.0f} MB written")
        require(self.finish_trainer() != 0, "the trainer did not notice")
        say(f"$ ls {self.mountpoint}\nls: cannot access: {self.how_it_died()}")
        command("mount", self.source, self.mountpoint)
        step = self.check_checkpoint()
        self.proven.append(
            f"daemon killed with {written / MB:.0f} of {full / MB:.0f} MB of the overwrite "
            f"written: after a new mount step {step} loads, bit for bit"
        )

    def how_it_died(self) -> str:
        """What a dead mount point answers; never that it is empty."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                list(self.mountpoint.iterdir())
            except OSError as error:
                if error.errno == errno.ENOTCONN:
                    return str(error.strerror)
                require(error.errno in DYING, f"a dead mount point says {error.strerror}")
            else:
                raise DemoError("a dead mount point can be listed")
        raise DemoError("the daemon does not die")

    def train_to_the_end(self) -> str:
        self.start_trainer()
        last = [*self.lines()][-1]
        require(self.finish_trainer() == 0, "the trainer failed")
        self.check_checkpoint()
        return last

    def compare_with_undisturbed(self, final: str) -> None:
        undisturbed = self.run_trainer()
        say(undisturbed)
        require(undisturbed == final, f"it ended with {final}: resuming changed the result")
        say("the same result, bit for bit")
        self.proven.append(
            f"killed twice, resumed twice: after {STEPS} steps the very weights of a run that "
            "nothing disturbed"
        )

    def summary(self, seconds: float, full: int) -> None:
        saves = sum(line.startswith("saved") for line in self.ledger_lines())
        headline("What this showed")
        say(f"   {saves} saves of {full / MB:.0f} MB by plain torch.save, always over one name")
        for line in self.proven:
            say(f"   {line}")
        say(f"   {seconds:.0f} seconds")

    # --- the trainer ------------------------------------------------------------------------

    @property
    def trainer(self) -> subprocess.Popen[str]:
        """The one that was started last."""
        if self._trainer is None:
            raise DemoError("no trainer was started")
        return self._trainer

    def start_trainer(self) -> None:
        arguments = [self.checkpoint, "--steps", STEPS, "--ledger", self.ledger]
        say(f"$ python demo_train.py {' '.join(map(str, arguments[:3]))}")
        with (self.work / "trainer.log").open("wb") as log:
            self._trainer = subprocess.Popen(
                [sys.executable, TRAINER, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def lines(self) -> Iterator[str]:
        """What the trainer prints, until it ends."""
        for line in self.trainer.stdout or ():
            say(line.rstrip("\n"))
            yield line.rstrip("\n")

    def finish_trainer(self) -> int:
        status = self.trainer.wait(PATIENCE_SECONDS)
        if status != 0:
            say("the trainer: " + (self.work / "trainer.log").read_text().splitlines()[-1])
        return status

    def train_until_mid_save(self, saves_before: int, part: float) -> tuple[int, int]:
        """Start it; return when a later save has written ``part``: how much, and of how much."""
        self.start_trainer()
        saves = 0
        for line in self.lines():
            saves += line.startswith("saved")
            if saves == saves_before:
                break
        require(saves == saves_before, "the trainer ended too early")
        full = self.checkpoint.stat().st_size
        deadline = time.monotonic() + PATIENCE_SECONDS
        # To its readers an overwrite is an ordinary one: the file is cut to nothing, then grows.
        while not part < (written := self.checkpoint.stat().st_size) / full < TOO_LATE:
            require(time.monotonic() < deadline, "no save was caught half done")
            time.sleep(0.0005)
        return written, full

    def run_trainer(self, *arguments: object) -> str:
        """The last line of a run to its end."""
        done = subprocess.run(
            [sys.executable, TRAINER, "--steps", str(STEPS), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        require(done.returncode == 0, f"the trainer failed: {done.stderr}")
        return done.stdout.splitlines()[-1]

    def check_checkpoint(self) -> int:
        """The checkpoint loads and is the last one whose save returned; returns its step.

        A save in flight may have become whole when the kill came: that one may be there too.
        """
        words = self.run_trainer(self.checkpoint, "--show").split()
        step, digest = words[1], words[-1]
        begun = [line.split() for line in self.ledger_lines()]
        saved = [line for line in begun if line[0] == "saved"][-1]
        allowed = [saved[1:], begun[-1][1:]]
        require([step, digest] in allowed, f"step {step} {digest} loads, saved was {saved}")
        say(f"the checkpoint loads: step {step}, digest {digest}, as the ledger has it")
        return int(step)

    def ledger_lines(self) -> list[str]:
        return self.ledger.read_text().splitlines()

    # --- the end ----------------------------------------------------------------------------

    def clean_up(self) -> None:
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.wait()
        if is_mounted(self.mountpoint):
            done = subprocess.run(
                [BIN / "cxlfs", "umount", self.mountpoint], capture_output=True, check=False
            )
            if done.returncode != 0:
                lazy = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
                subprocess.run([*lazy, self.mountpoint], check=False)


def is_mounted(directory: Path) -> bool:
    """Alive or dead."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return any(line.split()[4] == str(directory) for line in mounts.splitlines())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Show what cxlfs promises.")
    parser.add_argument("--size", default="2G", help="of the store, at least 1G (2G)")
    parser.add_argument("--directory", type=Path, help="where to put the store for the time")
    parser.add_argument(
        "--mountpoint", type=Path, help="an empty directory (/mnt/cxlckpt for root)"
    )
    return parser.parse_args()


def choose_directory(wanted: Path | None) -> Path:
    """A place with room: on a disk first, in memory otherwise."""
    needed = (2 << 30) + ROOM_BYTES
    candidates = [wanted] if wanted else [Path("/var/tmp"), Path(tempfile.gettempdir())]  # noqa: S108
    for candidate in [*candidates, *([] if wanted else [Path("/dev/shm")])]:  # noqa: S108
        if candidate.is_dir() and shutil.disk_usage(candidate).free > needed:
            return Path(tempfile.mkdtemp(prefix="cxlfs-demo-", dir=candidate))
    raise DemoError("no directory with 2 GiB to spare: name one with --directory")


@contextlib.contextmanager
def a_mountpoint(wanted: Path | None, work: Path) -> Iterator[Path]:
    """The directory to mount on; one made here is removed again."""
    path = wanted or (ROOT_MOUNTPOINT if os.geteuid() == 0 else work / "mnt")
    if wanted is None and (is_mounted(path) or (path.exists() and any(path.iterdir()))):
        path = work / "mnt"
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        if made and not is_mounted(path):
            path.rmdir()


def interrupted(number: int, _frame: object) -> NoReturn:
    raise DemoError(f"ended by {signal.Signals(number).name}")


def main() -> int:
    arguments = parse()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    work: Path | None = None
    try:
        work = choose_directory(arguments.directory)
        with a_mountpoint(arguments.mountpoint, work) as mountpoint:
            demo = Demo(work, mountpoint, arguments.size)
            try:
                demo.run()
            finally:
                demo.clean_up()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
