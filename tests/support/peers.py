"""Other people's test suites on a mounted store: how they run.

Never here: their code (a suite lies where the user says, or comes from a Debian package); how their
answers are counted (``peer_outcomes``).

Invariants
- Each run has a store of its own, mounted as root with ``allow_other,suid,dev``, as file systems of
  the kernel are. At the end it is unmounted and every byte of it verified.
- Under ``cxlfs run`` it is the suite that is preloaded, never a daemon.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from cxlfs.control.mountinfo import read_mounts
from tests.support.peer_outcomes import (
    Outcome,
    PeerError,
    count_check,
    count_prove,
    sort_stressor,
)

BIN = Path(sys.executable).parent
OPTIONS = "allow_other,suid,dev"
KILLS = 10
FSX_VARIANTS = {
    "": 1,
    "-Z -r 4096 -w 4096": 1,
    "-RW": 1,
    "-RW -l 8m -o 1m": 1,
    "-RW -Z -r 4096 -w 4096 -l 8m -o 1m": 1,
    "-c 20 -l 8m -o 1m": 10,
}
"""With O_DIRECT, without mapping, larger, opened anew now and then (for which it drops all caches
of the machine); which part of the operations each does.
"""
FIO_ENGINES = ("psync", "pvsync", "libaio", "mmap")
FIO_DIRECT = ("psync", "pvsync")
"""What they write under ``cxlfs run`` goes directly; what the others do is the kernel's."""
FIO_PATTERNS = ("write", "randwrite", "randrw")
FIO_BLOCKS = ("4k", "64k", "1m", "4m")
FIO_MODES = (("--end_fsync=1",), ("--fsync=32",), ("--numjobs=3",), ("--overwrite=1",))
_STRESSORS = (
    "access acl chattr chdir chmod chown copy-file dentry dir dirdeep dirmany dup eventfd "
    "fallocate fcntl fiemap file-ioctl filename flock fpunch fsize fstat getdent handle hdd "
    "inode-flags inotify io iomix lease link locka lockf lockofd metamix mknod open rename "
    "seal seek sendfile splice symlink sync-file touch truncate unlink utime xattr "
)
STRESSORS = _STRESSORS.split()
"""Of stress-ng, what concerns files; those that this version does not know are skipped."""
STRESS_SECONDS = 5


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where a suite runs. ``checkout``: where the user has it. ``arguments`` are for the suite."""

    work: Path
    size_bytes: int
    transport: str
    checkout: Path
    arguments: tuple[str, ...]
    quick: bool
    results: Path | None
    """Where a suite that leaves something leaves it."""
    under_run: bool = False
    """Its programs are started with ``cxlfs run``."""

    @property
    def report(self) -> Path:
        """A line for each ``cxlfs run``."""
        return self.work / "report"

    def started(self, *command: str | Path) -> list[str]:
        """The command of a suite's program, as it is to be run."""
        before = (str(BIN / "cxlfs"), "run", "--") if self.under_run else ()
        return [*before, *map(str, command)]

    def note_moved(self, outcome: Outcome, name: str) -> int | None:
        """How many bytes were stored directly since the last note; None where nothing can be."""
        if not self.under_run:
            return None
        lines = self.report.read_text().splitlines()
        moved = sum(int(json.loads(line)["direct_bytes"]) for line in lines)
        outcome.stored_directly[name] = moved
        self.report.write_bytes(b"")
        return moved

    @property
    def mountpoint(self) -> Path:
        return self.work / "mnt"

    @property
    def source(self) -> Path:
        return self.work / "store.cxlfs"

    def options(self) -> str:
        return f"{OPTIONS},transport={self.transport}"

    def mount(self) -> None:
        cxlfs("mount", self.source, self.mountpoint, "-o", self.options())

    def needs(self, *programs: str) -> None:
        """Raises PeerError when one is not below ``checkout``."""
        for name in programs:
            if not (self.checkout / name).exists():
                raise PeerError(f"{self.checkout} has no {name}: name a built checkout with --at")


def cxlfs(*arguments: object) -> str:
    command = [str(BIN / "cxlfs"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PeerError(f"{name} is not installed (Debian: {package})")
    return found


def output_of(command: Sequence[str | Path], directory: Path, **variables: str) -> str:
    """What it prints on both of its outputs, whatever its status."""
    with subprocess.Popen(
        list(map(str, command)),
        cwd=directory,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return process.communicate()[0]
        except BaseException:  # an end asked for is theirs too
            os.killpg(process.pid, signal.SIGKILL)
            raise


# --- one suite each -------------------------------------------------------------------------------


def pjdfstest(bench: Bench, say: Callable[[str], None]) -> Outcome:
    bench.needs("pjdfstest", "tests")
    tests = [str(bench.checkout / "tests" / name) for name in bench.arguments or ("",)]
    say("prove -r " + " ".join(tests))
    command = bench.started(program("prove", "perl"), "-rv", *tests)
    outcome = count_prove(output_of(command, bench.mountpoint))
    bench.note_moved(outcome, "all")
    return outcome


def xfstests(bench: Bench, say: Callable[[str], None]) -> Outcome:
    """It mounts by itself, a test store and a scratch store: the ``mount``, ``umount`` and ``df``
    that it finds first know the type.
    """
    bench.needs("check", "ltp/fsx")
    cxlfs("umount", bench.mountpoint)
    scratch = bench.work / "scratch.cxlfs"
    cxlfs("mkfs", scratch, "--size", bench.size_bytes)
    (bench.work / "scratch").mkdir()
    tools = bench.work / "bin"
    tools.mkdir()
    for name, text in (("mount", _MOUNT), ("umount", _UMOUNT), ("df", _DF)):
        real = program(name, "mount, coreutils")
        (tools / name).write_text(text.format(bin=BIN, real=real, options=bench.options()))
        (tools / name).chmod(0o755)
    config = bench.work / "local.config"
    config.write_text(
        f"export FSTYP=fuse FUSE_SUBTYP=.cxlfs\n"
        f"export TEST_DEV={bench.source} TEST_DIR={bench.mountpoint}\n"
        f"export SCRATCH_DEV={scratch} SCRATCH_MNT={bench.work / 'scratch'}\n"
        f"export RESULT_BASE={bench.results or bench.work / 'results'}\n"
    )
    arguments = bench.arguments or ("-g", "generic/quick")
    say("check " + " ".join(arguments))
    text = output_of(
        bench.started("./check", *arguments),
        bench.checkout,
        HOST_OPTIONS=str(config),
        PATH=f"{tools}:{os.environ['PATH']}:/usr/sbin:/sbin",
    )
    say(text)
    for place in (bench.work / "scratch", bench.mountpoint):
        if place.is_mount():
            cxlfs("umount", place)
    bench.mount()
    outcome = count_check(text)
    bench.note_moved(outcome, "all")
    return outcome


_MOUNT = """#!/bin/bash
# The type fuse.cxlfs goes to cxlfs, anything else to the mount of the system.
unset LD_PRELOAD # of cxlfs run
type="" options="{options}" rest=()
given=("$@")
while [ $# -gt 0 ]; do
    case $1 in
        -t) type=$2; shift ;;
        -o) options+=",$2"; shift ;;
        -*) rest+=("$1") ;;
        *) rest+=("$1") ;;
    esac
    shift
done
if [ "$type" = fuse.cxlfs ] && [ "${{#rest[@]}}" -eq 2 ] && [[ ",$options," != *,remount,* ]]; then
    said=$({bin}/cxlfs mount "${{rest[@]}}" -o "$options" 2>&1) && exit 0
    status=$?
    echo "$said" >&2
    exit $status
fi
[[ ",$options," != *,remount,* ]] || given=(-i "${{given[@]}}") # the kernel does it, not a helper
exec {real} "${{given[@]}}"
"""
_UMOUNT = """#!/bin/bash
# Of a store it returns when the store is closed.
unset LD_PRELOAD # of cxlfs run
if [ $# -eq 1 ]; then
    place=$(findmnt -rno TARGET -t fuse.cxlfs -S "$1" || findmnt -rno TARGET -t fuse.cxlfs -M "$1")
    [ -z "$place" ] || exec {bin}/cxlfs umount "$place" >/dev/null
fi
exec {real} "$@"
"""
_DF = """#!/bin/bash
# The suite knows the type without what follows the dot.
{real} "$@" | sed 's/ fuse[.]cxlfs / fuse /'
exit "${{PIPESTATUS[0]}}"
"""


def fsx(bench: Bench, say: Callable[[str], None]) -> Outcome:
    """Random programs on one file: FSX_VARIANTS."""
    bench.needs("ltp/fsx")
    outcome = Outcome("fsx")
    seeds = range(1, 3 if bench.quick else 5)
    for seed, (variant, part) in product(seeds, FSX_VARIANTS.items()):
        operations = (2000 if bench.quick else 20_000) // part
        name = f"seed {seed} {variant}".strip()
        say(f"fsx, {operations} operations, {name}")
        command = [bench.checkout / "ltp/fsx", "-q", "-S", str(seed), "-N", str(operations)]
        text = output_of(bench.started(*command, *variant.split(), "fsx-file"), bench.mountpoint)
        good = "All" in text and "operations completed" in text
        # With a shared mapping all is the kernel's until the file is opened anew.
        idle = bench.note_moved(outcome, name) == 0 and ("-RW" in variant or "-c" in variant)
        outcome.add(name, "failed" if not good else "not direct" if idle else "passed")
        if not good:
            say(text[-2000:])
    return outcome


def fsstress(bench: Bench, say: Callable[[str], None]) -> Outcome:
    """Four programs of random calls; the daemon is killed under them, and the store mounted again
    and verified each time.
    """
    bench.needs("ltp/fsstress")
    outcome = Outcome("fsstress")
    rng = random.Random(1)
    for number in range(2 if bench.quick else KILLS):
        command = [bench.checkout / "ltp/fsstress", "-p", "4", "-n", "1000000", "-s", str(number)]
        directory = bench.mountpoint / f"round-{number}"
        directory.mkdir()
        say(f"fsstress, kill {number + 1}")
        with subprocess.Popen(
            bench.started(*command, "-d", directory),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            time.sleep(rng.uniform(0.5, 3.0))
            pid = json.loads(cxlfs("status", bench.mountpoint, "--json"))["pid"]
            watch = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _wait_for_exit(watch)
        bench.mount()
        cxlfs("umount", bench.mountpoint)
        verified = _verify(bench)
        outcome.add(f"kill {number + 1}", "passed" if verified == "clean" else verified)
        bench.mount()
    return outcome


def _wait_for_exit(watch: int) -> None:
    import select

    select.select([watch], [], [], 60)
    os.close(watch)


def fio(bench: Bench, say: Callable[[str], None]) -> Outcome:
    """What was written is read back and compared by fio itself."""
    found = program("fio", "fio")
    outcome = Outcome("fio")
    combinations = list(product(FIO_ENGINES, FIO_PATTERNS, FIO_BLOCKS, FIO_MODES))
    for engine, pattern, block, mode in combinations[:: 10 if bench.quick else 1]:
        name = f"{engine} {pattern} {block} {' '.join(mode)}"
        say(f"fio, {name}")
        command = [found, "--name=job", f"--directory={bench.mountpoint}", "--size=16m"]
        command += [f"--ioengine={engine}", f"--rw={pattern}", f"--bs={block}", "--iodepth=8"]
        command += ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--unlink=1", *mode]
        command += ["--minimal", "--output=/dev/null"]
        command = bench.started(*command)
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        idle = bench.note_moved(outcome, name) == 0 and engine in FIO_DIRECT
        failed = done.returncode != 0
        outcome.add(name, "failed" if failed else "not direct" if idle else "passed")
        if failed:
            say(done.stderr[-2000:])
    return outcome


def stress_ng(bench: Bench, say: Callable[[str], None]) -> Outcome:
    """Each stressor by itself; what it does to the file system, it checks."""
    found = program("stress-ng", "stress-ng")
    outcome = Outcome("stress-ng")
    known = set(output_of([found, "--stressors"], Path("/")).split())
    for name in bench.arguments or STRESSORS:
        if name not in known:
            outcome.add(name, "skipped")
            continue
        say(f"stress-ng, {name}")
        seconds = "1" if bench.quick else str(STRESS_SECONDS)
        command = [found, f"--{name}", "2", "--timeout", seconds, "--verify", "--oom-avoid"]
        command += ["--temp-path", str(bench.mountpoint)]
        text = output_of(bench.started(*command), Path("/"))
        bench.note_moved(outcome, name)
        outcome.add(name, sort_stressor(text))
        if name in outcome.failed:
            say(text[-2000:])
    return outcome


SUITES: dict[str, Callable[[Bench, Callable[[str], None]], Outcome]] = {
    "pjdfstest": pjdfstest,
    "xfstests": xfstests,
    "fsx": fsx,
    "fsstress": fsstress,
    "fio": fio,
    "stress-ng": stress_ng,
}


# --- a run ----------------------------------------------------------------------------------------


def run(name: str, bench: Bench, say: Callable[[str], None]) -> Outcome:
    """Make a store, mount it, run the suite, unmount and verify. Raises PeerError."""
    bench.mountpoint.mkdir(mode=0o755)
    cxlfs("mkfs", bench.source, "--size", bench.size_bytes, "--force")
    began = time.monotonic()
    bench.mount()
    if bench.under_run:
        bench.report.touch()
        bench.report.chmod(0o666)  # suites become other users
        os.environ["CXLFS_RUN_REPORT"] = str(bench.report)
        os.environ["CXLFS_RUN_FROM"] = "4096"  # small writes are what suites make
    try:
        bench.mountpoint.chmod(0o777)
        outcome = SUITES[name](bench, say)
    except BaseException:
        for mount in read_mounts():
            if mount.mountpoint.startswith(f"{bench.work}/"):
                subprocess.run(["umount", "-l", mount.mountpoint], check=False)
        raise
    cxlfs("umount", bench.mountpoint)
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.verify = _verify(bench)
    return outcome


def _verify(bench: Bench) -> str:
    command = [str(BIN / "cxlfs"), "verify", str(bench.source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "clean" if done.returncode == 0 else (done.stdout + done.stderr).strip()
