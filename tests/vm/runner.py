"""Runs the campaigns of several targets, some at a time, and gathers one report."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.vm import needs
from tests.vm.campaign import Campaign
from tests.vm.cuts import cuts_of
from tests.vm.machine import Target, qemu_version, usable_kvm, with_room_for_pages

IMPORT_TEST = "import cxlfs.cli, cxlfs.fuse, cxlfs.store, numpy, pyfuse3"
# An emulated processor is slow, and what the guest compiles itself is lost with its RAM.
COMPILE = (
    "import compileall, pathlib, cxlfs; [compileall.compile_dir(folder, quiet=2) for "
    "folder in (pathlib.Path(cxlfs.__file__).parent, pathlib.Path('tests/vm'))]"
)


def default_python(root: Path) -> Path:
    """The environment of the checkout where there is one, else this interpreter."""
    own = root / ".venv" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def program(python: Path) -> Path:
    """The cxlfs command that was installed with this interpreter."""
    return python.parent / "cxlfs"


def python_problems(python: Path) -> list[str]:
    """Why ``python`` cannot run cxlfs; empty when it can."""
    command = [str(python), "-c", IMPORT_TEST]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 0 and program(python).exists():
        return []
    last = (ended.stderr.strip().splitlines() or ["it has no cxlfs command"])[-1]
    return [f"{python} cannot run cxlfs ({last}); scripts/test makes .venv, or name one: --python"]


def compile_modules(python: Path, root: Path) -> None:
    """Have Python's compiled files lie beside the sources, if those can be written."""
    subprocess.run([str(python), "-c", COMPILE], cwd=root, check=False, capture_output=True)


def _environment() -> dict[str, str]:
    """What the guest's command gets of ours: nothing that only makes sense here."""
    environment = {"HOME": "/root", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        if name in os.environ:
            environment[name] = os.environ[name]
    return environment


def run(
    *,
    targets: Sequence[Target],
    cuts: int,
    seed: int,
    accel: str,
    jobs: int,
    python: Path,
    root: Path,
    work: Path,
    say: Callable[[str], None],
    direct: bool = False,
) -> dict[str, object]:
    """The report: ``passed``, and for each target its rounds and problems. ``work`` gets a folder
    for each target; ``jobs`` virtual machines run at a time. Everything needed must be there
    (``needs``). ``direct``: programs store by themselves. ``say`` is called from several threads.
    """
    kernel = needs.find_kernel()
    if kernel is None:
        raise FileNotFoundError(needs.KERNEL_PACKAGE)
    accel = ("kvm" if usable_kvm() else "tcg") if accel == "auto" else accel
    version = qemu_version()
    say(f"{version}; Linux {kernel.version}; {accel}; seed {seed}")
    began = time.monotonic()
    compile_modules(python, root)

    campaigns = []
    for target in targets:
        folder = work / target.name
        folder.mkdir()
        one = Campaign(
            with_room_for_pages(target) if direct else target,
            folder,
            kernel,
            accel,
            python=python,
            directory=root,
            environment=_environment(),
            say=say,
            direct=direct,
        )
        campaigns.append((one, cuts_of(random.Random(f"{seed} {target.name}"), cuts)))
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(one.run, planned, reboot=cuts > 1) for one, planned in campaigns]
        try:
            results = [future.result() for future in futures]
        except BaseException:  # Ctrl-C too: the pool would wait for the last boot of all
            for future, (one, _planned) in zip(futures, campaigns, strict=True):
                future.cancel()
                one.stop()
            raise
    return {
        "passed": not any(result.problems for result in results),
        "seed": seed,
        "machine": platform.platform(),
        "qemu": version,
        "kernel": kernel.version,
        "accel": accel,
        "seconds": round(time.monotonic() - began, 1),
        "targets": [result.as_json() for result in results],
    }
