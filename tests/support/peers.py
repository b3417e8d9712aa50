"""Other people's test suites on a mounted store: how they run, and how their answers are counted.

Never here: their code. A suite lies where the user says, or comes from a Debian package.

Invariants
- Each run has a store of its own, mounted as root with ``allow_other,suid,dev``, as file systems of
  the kernel are. At the end it is unmounted and every byte of it verified.
- What is expected to differ is named in KNOWN with its reason, and is still run and counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from cxlfs.control.mountinfo import read_mounts

BIN = Path(sys.executable).parent
OPTIONS = "allow_other,suid,dev"
KILLS = 10
FIO_ENGINES = ("psync", "libaio", "mmap")
FIO_PATTERNS = ("write", "randwrite", "randrw")
FIO_BLOCKS = ("4k", "64k", "1m")
FIO_MODES = (("--end_fsync=1",), ("--fsync=32",), ("--numjobs=3",))
_STRESSORS = (
    "access acl chattr chdir chmod chown copy-file dentry dir dirdeep dirmany dup eventfd "
    "fallocate fcntl fiemap file-ioctl filename flock fpunch fsize fstat getdent handle hdd "
    "inode-flags inotify io iomix lease link locka lockf lockofd metamix mknod open rename "
    "seal seek sendfile splice symlink sync-file touch truncate unlink utime xattr "
)
STRESSORS = _STRESSORS.split()
"""Of stress-ng, what concerns files; those that this version does not know are skipped."""
STRESS_SECONDS = 5


class PeerError(Exception):
    """A suite cannot be run; the message says why."""


@dataclasses.dataclass
class Outcome:
    """Counts, and the names of what failed and of what was skipped."""

    suite: str
    passed: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    verify: str = "not verified"

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
    return count_prove(output_of([program("prove", "perl"), "-rQ", *tests], bench.mountpoint))


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
    return Outcome("pjdfstest", int(total[2]) - len(failed), failed)


def _numbers(text: str) -> Iterator[int]:
    """Of ``3, 5-7``."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


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
        ["./check", *arguments],
        bench.checkout,
        HOST_OPTIONS=str(config),
        PATH=f"{tools}:{os.environ['PATH']}:/usr/sbin:/sbin",
    )
    say(text)
    for place in (bench.work / "scratch", bench.mountpoint):
        if place.is_mount():
            cxlfs("umount", place)
    bench.mount()
    return count_check(text)


_MOUNT = """#!/bin/bash
# The type fuse.cxlfs goes to cxlfs, anything else to the mount of the system.
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


def count_check(text: str) -> Outcome:
    """Of what ``check`` prints at its end."""

    def names(word: str) -> list[str]:
        found = re.search(rf"^{word}: (.*)$", text, re.MULTILINE)
        return found[1].split() if found else []

    ran, skipped, failed = names("Ran"), names("Not run"), names("Failures")
    if not ran:
        raise PeerError(f"check ran nothing: {text[-500:]}")
    return Outcome("xfstests", len(set(ran) - set(skipped) - set(failed)), failed, skipped)


def fsx(bench: Bench, say: Callable[[str], None]) -> Outcome:
    """Random programs on one file, with and without O_DIRECT and mappings."""
    bench.needs("ltp/fsx")
    outcome = Outcome("fsx")
    operations = 2000 if bench.quick else 20_000
    for seed, extra in product(
        range(1, 3 if bench.quick else 5), ("", "-Z -r 4096 -w 4096", "-RW")
    ):
        name = f"seed {seed} {extra}".strip()
        say(f"fsx, {operations} operations, {name}")
        command = [bench.checkout / "ltp/fsx", "-q", "-S", str(seed), "-N", str(operations)]
        text = output_of([*command, *extra.split(), "fsx-file"], bench.mountpoint)
        if "All" in text and "operations completed" in text:
            outcome.passed += 1
        else:
            outcome.failed.append(name)
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
            [*map(str, command), "-d", str(directory)],
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
        if verified == "clean":
            outcome.passed += 1
        else:
            outcome.failed.append(f"kill {number + 1}: {verified}")
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
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        if done.returncode == 0:
            outcome.passed += 1
        else:
            outcome.failed.append(name)
            say(done.stderr[-2000:])
    return outcome


def stress_ng(bench: Bench, say: Callable[[str], None]) -> Outcome:
    """Each stressor by itself; what it does to the file system, it checks."""
    found = program("stress-ng", "stress-ng")
    outcome = Outcome("stress-ng")
    known = set(output_of([found, "--stressors"], Path("/")).split())
    for name in bench.arguments or STRESSORS:
        if name not in known:
            outcome.skipped.append(name)
            continue
        say(f"stress-ng, {name}")
        seconds = "1" if bench.quick else str(STRESS_SECONDS)
        command = [found, f"--{name}", "2", "--timeout", seconds, "--verify", "--oom-avoid"]
        text = output_of([*command, "--temp-path", bench.mountpoint], Path("/"))
        _sort_stressor(outcome, name, text)
        if name in outcome.failed:
            say(text[-2000:])
    return outcome


def _sort_stressor(outcome: Outcome, name: str, text: str) -> None:
    """By its last words; a skipped one is successful too."""
    if "unsuccessful run" in text or re.search(r"stress-ng: fail:", text):
        outcome.failed.append(name)
    elif re.search(r"skipping stressor|skipped:\s*[1-9]", text):
        outcome.skipped.append(name)
    elif "successful run completed" in text:
        outcome.passed += 1
    else:
        outcome.failed.append(name)


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


def describe(outcome: Outcome) -> Iterable[str]:
    known = KNOWN.get(outcome.suite, {})
    for name in outcome.failed:
        yield f"FAILED {name}" if name not in known else f"differs {name}: {known[name]}"
    yield (
        f"{outcome.suite}: {outcome.passed} passed, {len(outcome.failed)} failed or differ "
        f"({len(outcome.unexpected())} not expected), {len(outcome.skipped)} skipped, "
        f"{outcome.seconds:.0f} s; the store afterwards: {outcome.verify}"
    )
