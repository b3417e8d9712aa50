"""What of csrc/ can be tried without an Arm64 machine: compiled for one, and run by QEMU's user
emulation. All of it is compiled there without a warning.

The emulator of Debian 12 (7.2) says that it has DC CVAP, and ends a program that uses it; programs
then run with ``CXLFS_WRITE_BACK=none``. The instructions are looked at in ``test_disassembly.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.compiling import CSRC, STRICT, all_sources, compile_program
from tests.support.client_library import SCENES
from tests.support.repository import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", ["qemu-aarch64", "-cpu", "max"]
LACKING = [name for name in (COMPILER, EMULATOR[0]) if shutil.which(name) is None]
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        bool(LACKING),
        reason=f"not installed: {', '.join(LACKING)} (Debian: gcc-aarch64-linux-gnu "
        "libc6-dev-arm64-cross qemu-user)",
    ),
]
WRITES_BACK = """
int main(void)
{
    static char line[64];
    __asm__ volatile(".arch armv8.2-a\\ndc cvap, %0" : : "r"(line) : "memory");
    return 0;
}
"""
PRELOADED = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static char bytes[3 << 20];

int main(int argc, char **argv)
{
    int status;
    FILE *file = fopen(argv[argc - 1], "w");
    if (file == NULL || fwrite(bytes, sizeof bytes, 1, file) != 1)
        return 1;
    pid_t child = vfork();
    if (child == 0)
        _exit(7);
    return waitpid(child, &status, 0) != child || status != 7 << 8 || fclose(file) != 0;
}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With which programs run."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text(WRITES_BACK)
    compiled = [COMPILER, "-static", "-o", folder / "probe", folder / "probe.c"]
    subprocess.run(compiled, check=True)
    done = subprocess.run([*EMULATOR, folder / "probe"], capture_output=True, check=False)
    return dict(os.environ) if done.returncode == 0 else os.environ | {"CXLFS_WRITE_BACK": "none"}


def complaints(environment: dict[str, str], *command: str | Path) -> str:
    """What a program writes that should be silent, but for numbers on standard error."""
    done = subprocess.run(
        [*EMULATOR, *command], capture_output=True, text=True, check=False, env=environment
    )
    print(done.stderr)
    is_told = done.returncode != 0 or "ld.so" in done.stderr
    return f"{done.returncode}: {done.stdout}{done.stderr}" if is_told else done.stdout


PROGRAMS = {
    "harness": (["harness.c"], "persist/", []),
    "client": (["client.c"], "", ["SEED"]),
    "threads": (["threads.c", "threads_store.c", "threads_snapshots.c"], "", ["1", "SEED"]),
    "threads_direct": (["threads_direct.c"], "", ["1", "SEED"]),
}
"""Their sources, the part of csrc/ that they need, and what they are told."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_stand_inside(
    name: str, environment: dict[str, str], tmp_path: Path, seed: int
) -> None:
    programs, part, arguments = PROGRAMS[name]
    others = [path for path in all_sources() if path.startswith(part)]
    compile_program(programs, others, tmp_path / name, COMPILER, ["-static"])
    told = [str(seed) if word == "SEED" else word for word in arguments]
    assert complaints(environment, tmp_path / name, *told) == ""


def test_the_client_library(environment: dict[str, str], tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    build = [ROOT / "scripts/build-client", prefix]
    subprocess.run(build, check=True, env=os.environ | {"CC": COMPILER})
    binary = tmp_path / "program"
    source = ROOT / "tests/client/program.c"
    options = ["-static", "-std=c11", *STRICT, f"-I{prefix}/include", f"-L{prefix}/lib", "-pthread"]
    command = [COMPILER, *options, "-o", binary, source, "-l:libcxlfs.a"]
    subprocess.run(command, check=True)
    for scene in SCENES:
        assert complaints(environment, binary, scene, tmp_path / scene, "kernel") == "", scene


def test_what_is_preloaded(environment: dict[str, str], tmp_path: Path) -> None:
    parts = [str(path.relative_to(CSRC)) for path in sorted(CSRC.glob("run/*.c"))]
    parts += [path for path in all_sources() if path.startswith(("client/", "persist/"))]
    library, program = tmp_path / "library.so", tmp_path / "program"
    linking = ["-shared", "-fPIC", "-fvisibility=hidden"]
    sources = [CSRC / part for part in parts]
    options = ["-std=gnu11", "-O2", *STRICT, "-D_GNU_SOURCE", "-pthread", f"-I{CSRC}"]
    subprocess.run([COMPILER, *options, *linking, "-o", library, *sources], check=True)
    (tmp_path / "program.c").write_text(PRELOADED)
    subprocess.run([COMPILER, "-o", program, tmp_path / "program.c"], check=True)
    where = ["-L", "/usr/aarch64-linux-gnu", "-E", f"LD_PRELOAD={library}"]
    assert complaints(environment, *where, program, tmp_path / "file") == ""
    assert (tmp_path / "file").stat().st_size == 3 << 20
