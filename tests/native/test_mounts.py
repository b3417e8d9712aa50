"""Who made a mount, as a program that stores by itself reads it in /proc/self/mountinfo: nothing
that another user may choose changes the answer.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.native.compiling import compile_program, needs_compiler

pytestmark = needs_compiler
SEED = 20261126
TRIALS = 150
NAMES = (
    *("user_id=0", ",user_id=0", "rw,user_id=0,group_id=0", " ", "-", " - ", "fuse.cxlfs", "\\"),
    *("- fuse.cxlfs x rw,user_id=0", "\n", "0:77", "#", "a" * 70, "/mnt", "\t", "\\040", "é", ""),
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mounts") / "mounts"
    compile_program(["mounts.c"], ["client/mounts.c"], target)
    return target


def owner(program: Path, table: bytes, device: str = "0:77") -> int:
    done = subprocess.run(
        [program, *device.split(":")], input=table, capture_output=True, check=True
    )
    return int(done.stdout)


def line(
    *,
    device: str = "0:77",
    point: str = "/mnt",
    source: str = "/dev/dax0.0",
    system: str = "fuse.cxlfs",
    options: str = "rw,user_id=1000,group_id=1000,default_permissions,allow_other",
    optional: str = "shared:9 master:3 ",
) -> bytes:
    """As the kernel writes it (fs/proc_namespace.c): what may hold anything is escaped."""
    point, source = (
        "".join(f"\\{ord(c):03o}" if c in " \t\n\\#" else c for c in name)
        for name in (point, source)
    )
    given = f"36 35 {device} / {point} rw,nosuid {optional}- {system} {source} {options}\n"
    return given.encode()


def test_the_owner_is_the_one_that_the_kernel_says(program: Path) -> None:
    others = line(device="0:7", options="rw,user_id=0") + line(device="10:77") * 30
    assert owner(program, others + line() + others) == 1000
    assert owner(program, line(options="rw,user_id=0,group_id=0", optional="")) == 0
    assert owner(program, line(options='rw,context="a,user_id=0",user_id=7,group_id=0')) == 7


@pytest.mark.parametrize(
    "table",
    [
        b"",
        line(device="0:78"),
        line(system="fuse.sshfs", options="rw,user_id=0"),
        line(system="fuse", options="rw,user_id=0"),
        line(system="fuse.cxlfs2", options="rw,user_id=0"),
        line(system="tmpfs", options="rw,user_id=0"),
        line(options="rw,user_id=,group_id=0"),
        line(options="rw,user_id=0x0"),
        line(options="rw,user_id=99999999999"),
        line(options="rw,my_user_id=0"),
        line(options="rw"),
        line(options="rw,user_id=0").rstrip(b"\n"),  # cut off
        b"36 35 0:77 / /mnt rw - fuse.cxlfs\n",
        b"36 35 0:77 - fuse.cxlfs source rw,user_id=0\n",
    ],
)
def test_whatever_is_no_mount_of_cxlfs_has_no_owner(program: Path, table: bytes) -> None:
    assert owner(program, table) == -1


def test_names_that_others_choose_change_nothing(program: Path) -> None:
    chosen = random.Random(SEED)
    for trial in range(TRIALS):
        point, source = ("".join(chosen.choices(NAMES, k=chosen.randrange(5))) for _ in range(2))
        before = line(device="0:5", point=source, source=point) * chosen.randrange(3)
        table = before + line(point="/" + point, source=source)
        assert owner(program, table) == 1000, (SEED, trial, table)
