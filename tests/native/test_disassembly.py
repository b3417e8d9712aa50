"""The instructions that durability rests on, read from the machine code itself.

A write-back of the wrong line, or none, passes every test on a machine whose power stays on.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import cxlfs._native
import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
EXTENSION = Path(cxlfs._native.__file__)

pytestmark = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
ARM_COMPILER = "aarch64-linux-gnu-gcc" if platform.machine() != "aarch64" else "gcc"
ARM_OBJDUMP = "aarch64-linux-gnu-objdump" if platform.machine() != "aarch64" else "objdump"


def disassemble(binary: Path, function: str, objdump: str = "objdump") -> list[str]:
    """``mnemonic operands`` of each instruction of a function."""
    command = [objdump, "-d", "--no-show-raw-insn", f"--disassemble={function}", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    body = text.partition(f"<{function}>:\n")[2].partition("\n\n")[0]
    instructions = [line.partition("\t")[2].strip() for line in body.splitlines()]
    assert instructions, f"{function} is not in {binary}"
    return [" ".join(line.split()) for line in instructions]


@on_x86
@pytest.mark.parametrize("mnemonic", ["clwb", "clflushopt", "clflush"])
def test_write_back_names_the_register_that_walks_the_lines(mnemonic: str) -> None:
    code = disassemble(EXTENSION, f"cxl_write_back_{mnemonic}")
    uses = [line for line in code if line.split()[0] == mnemonic]
    assert len(uses) == 1, code
    operand = re.fullmatch(mnemonic + r" \(%(r\w+)\)", uses[0])
    assert operand is not None, uses
    register = operand[1]
    # The same register was rounded down to a line ...
    rounded = rf"and \$0xffffffffffffffc0,%{register}"
    # ... came from the first argument ...
    from_argument = register == "rdi" or f"mov %rdi,%{register}" in code
    # ... and goes from line to line.
    step = (
        rf"(add \$0x40,%{register}|sub \$0xffffffffffffffc0,%{register}"
        rf"|lea 0x40\(%{register}\),%{register})"
    )
    assert any(re.fullmatch(rounded, line) for line in code), code
    assert from_argument, code
    assert any(re.fullmatch(step, line) for line in code), code


@on_x86
def test_fence_is_sfence() -> None:
    assert "sfence" in disassemble(EXTENSION, "cxl_fence_sfence")


@on_x86
@pytest.mark.parametrize(
    ("function", "store", "per_line"),
    [
        ("cxl_copy_lines_sse2", "movntps|movntdq|movntpd", 4),
        ("cxl_copy_lines_avx2", "vmovntdq|vmovntps|vmovntpd", 2),
        ("cxl_copy_lines_avx512", "vmovntdq|vmovntps|vmovntpd", 1),
        ("cxl_copy_lines_sse42", "movnti", 1),
        ("cxl_copy_lines_vpclmul256", "vmovntdq|vmovntps|vmovntpd|movnti", 1),
        ("cxl_copy_lines_vpclmul", "vmovntdq|vmovntps|vmovntpd", 1),
    ],
)
def test_line_copies_store_past_the_cache_only(function: str, store: str, per_line: int) -> None:
    """Whole lines need no write-back just because no ordinary store touches the target."""
    code = disassemble(EXTENSION, function)
    past = [line for line in code if re.fullmatch(rf"(?:{store}) .*", line)]
    assert len(past) >= per_line
    assert len(past) % per_line == 0
    into_memory = [line for line in code if re.fullmatch(r"v?mov\w* %[xyz]mm\d+,.*\(.*\).*", line)]
    ordinary = [line for line in into_memory if line not in past and "(%rsp" not in line]
    assert not ordinary, ordinary


@pytest.mark.skipif(
    shutil.which(ARM_COMPILER) is None or shutil.which(ARM_OBJDUMP) is None,
    reason="no compiler for Arm64 (Debian: gcc-aarch64-linux-gnu)",
)
@pytest.mark.parametrize("instruction", ["cvap", "cvadp"])
def test_arm_write_back_and_fence(instruction: str, tmp_path: Path) -> None:
    binary = tmp_path / "persist_arm.o"
    command = [ARM_COMPILER, "-std=gnu11", "-O2", "-Wall", "-Werror", "-D_GNU_SOURCE"]
    subprocess.run(
        [*command, f"-I{CSRC}", "-c", str(CSRC / "persist/persist_arm.c"), "-o", str(binary)],
        check=True,
    )
    code = disassemble(binary, f"cxl_write_back_{instruction}", ARM_OBJDUMP)
    uses = [line for line in code if line.startswith("dc ")]
    assert len(uses) == 1, code
    register = uses[0].removeprefix(f"dc {instruction}, ")
    assert re.fullmatch(r"x\d+", register), uses
    assert any(re.match(rf"and {register}, x\d+, x\d+", line) for line in code), code
    assert any(re.match(rf"add {register}, {register}, x\d+", line) for line in code), code
    assert "dsb sy" in disassemble(binary, "cxl_fence_dsb", ARM_OBJDUMP)
