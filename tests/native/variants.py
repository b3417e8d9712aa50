"""Checks that run in a process of their own, once for each routine that the environment can choose.

``python variants.py CHECK`` runs one check and exits 1 with a line for each failure; the tests
beside it start it with the override set. It imports :mod:`cxlfs.native` alone, to start fast.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cxlfs.errors import MediaError, UsageError
from cxlfs.native import Granularity, MappedRegion, crc32c, routines

WRITE_BACK = ("clwb", "clflushopt", "clflush", "none", "dc-cvap", "dc-cvadp")
CRC32C = ("crc32c-vpclmul", "crc32c-vpclmul256", "crc32c-sse42", "crc32c-arm", "crc32c-table")
COPY = ("nt-avx512", "nt-avx2", "nt-sse2", "stores")
LACKING = 77  # exit status: this CPU has no such routine

SEED = 20240229
GUARD = 0xA5  # what the media holds around a copy


def run(check: str, **overrides: str) -> int:
    """Exit status of a check under ``overrides``; its output goes to the test's output."""
    environment = {name: value for name, value in os.environ.items() if "CXLFS_" not in name}
    result = subprocess.run(
        [sys.executable, __file__, check],
        env=environment | overrides,
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout, result.stderr)
    return result.returncode


def oracle_crc32c(data: bytes, crc: int = 0) -> int:
    """CRC32C bit by bit, from the definition."""
    state = crc ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


class Oracle:
    """The same with a table of one byte, fast enough for many lengths."""

    def __init__(self) -> None:
        self.table = [oracle_crc32c(bytes([byte]), 0xFFFFFFFF) ^ 0xFFFFFFFF for byte in range(256)]

    def crc32c(self, data: bytes, crc: int = 0) -> int:
        state, table = crc ^ 0xFFFFFFFF, self.table
        for byte in data:
            state = state >> 8 ^ table[(state ^ byte) & 255]
        return state ^ 0xFFFFFFFF


def noise(length: int) -> bytes:
    """The same pseudo-random bytes each time."""
    state, out = SEED, bytearray()
    while len(out) < length:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out += (state >> 24).to_bytes(5, "little")
    return bytes(out[:length])


def check_crc32c() -> list[str]:
    """Every length up to some turns of the widest loop, every alignment, seeds, and pieces."""
    oracle, data, failures = Oracle(), noise(16384), []
    lengths = [*range(600), 767, 768, 769, 1024, 1151, 1152, 3071, 3072, 3073, 3456, 9999, 16000]
    for length in lengths:
        start = length * 11 % 64
        piece = data[start : start + length]
        seed = length * 2654435761 % (1 << 32)
        expected = oracle.crc32c(piece, seed)
        if crc32c(memoryview(data)[start : start + length], seed) != expected:
            failures.append(f"length {length} at alignment {start}")
        middle = length * 5 // 7
        if crc32c(piece[middle:], crc32c(piece[:middle], seed)) != expected:
            failures.append(f"length {length} in two pieces")
    failures += [
        f"alignment {start}"
        for start in range(64)
        if crc32c(memoryview(data)[start : start + 4097])
        != oracle.crc32c(data[start : start + 4097])
    ]
    return failures


def check_copy() -> list[str]:
    """All 64 x 64 ragged heads and tails, short and long, with and without the checksum."""
    oracle, data, failures = Oracle(), noise(4096), []
    region = MappedRegion(MappedRegion.anonymous_handle(8192, granularity=Granularity.LINE))
    memory = region.unguarded_memory()
    blank = bytes([GUARD]) * len(memory)
    for head in range(64):
        for tail in range(64):
            for lines in (0, 1, 6, 9):
                length = lines * 64 + (tail - head) % 64
                offset, start = 128 + head, (head * 7 + tail * 13) % 64
                source = memoryview(data)[start : start + length]
                expected = blank[:offset] + bytes(source) + blank[offset + length :]
                memory[:] = blank
                region.copy(offset, source)
                if memory != expected:
                    failures.append(f"copy: head {head}, tail {tail}, {lines} lines")
                memory[:] = blank
                crc = region.copy_crc32c(offset, source, head)
                if memory != expected:
                    failures.append(f"copy with checksum: head {head}, tail {tail}, {lines} lines")
                if lines == 9 and tail % 8 == 3 and crc != oracle.crc32c(bytes(source), head):
                    failures.append(f"checksum: head {head}, tail {tail}")
                if crc != crc32c(source, head):
                    failures.append(f"checksum differs: head {head}, tail {tail}, {lines} lines")
    return failures + check_large_copy(region)


def check_large_copy(region: MappedRegion) -> list[str]:
    """Longer than every block and turn of the fused loops."""
    data, failures, memory = noise(7900), [], region.unguarded_memory()
    for length in (3071, 3072, 3136, 3456, 6144, 7777):
        for offset in (0, 1, 63, 64):
            if region.copy_crc32c(offset, data[:length]) != crc32c(data[:length]):
                failures.append(f"checksum of {length} bytes at {offset}")
            if memory[offset : offset + length] != data[:length]:
                failures.append(f"copy of {length} bytes at {offset}")
    return failures


def check_changing_source() -> list[str]:
    """The checksum is of what was stored, though somebody else changes the source meanwhile."""
    length, turns, mixed, failures = 1 << 20, 3000, 0, []
    region = MappedRegion(MappedRegion.anonymous_handle(length + 128, granularity=Granularity.LINE))
    memory = region.unguarded_memory()
    source, old, new = mmap.mmap(-1, length), noise(length), noise(length)[::-1]
    changer = os.fork()
    while changer == 0:
        source[:] = old
        source[:] = new
    try:
        for turn in range(turns):
            offset, piece = turn % 64, length - turn * 37
            crc = region.copy_crc32c(offset, memoryview(source)[:piece])
            stored = memory[offset : offset + piece]
            if crc != crc32c(stored):
                failures.append(f"{piece} bytes at {offset}, turn {turn}")
            mixed += stored not in (old[:piece], new[:piece])
            if mixed == 200 or failures:
                break
    finally:
        os.kill(changer, signal.SIGKILL)
        os.waitpid(changer, 0)
    return failures


def check_write_back_address() -> list[str]:
    """The instruction is given the address: beyond the end of a cut file it faults, before not.

    A write-back of some other line would either not fault, or kill the process.
    """
    failures = []
    with tempfile.NamedTemporaryFile() as file:
        os.ftruncate(file.fileno(), 8192)
        region = MappedRegion(
            MappedRegion.map_handle(file.fileno(), 8192, granularity=Granularity.LINE)
        )
        region.store(0, bytes(8192))
        region.write_back(0, 8192)
        os.ftruncate(file.fileno(), 4096)
        region.store(0, bytes(4096))
        region.write_back(0, 4096)
        for offset, length in ((4096, 1), (4095, 2), (0, 4097), (8191, 1), (4096 + 63, 1)):
            try:
                region.write_back(offset, length)
            except MediaError:
                continue
            failures.append(f"no fault for {length} bytes at {offset}")
        region.fence()
        region.close()
    return failures


def check_names() -> list[str]:
    """What was asked for is what was chosen."""
    chosen = routines()
    wanted = {
        "CXLFS_WRITE_BACK": chosen.write_back,
        "CXLFS_CRC32C": chosen.crc32c,
        "CXLFS_COPY": chosen.copy,
    }
    return [
        f"{name}={os.environ[name]} but {value}"
        for name, value in wanted.items()
        if os.environ.get(name, value) not in (value, "")
    ]


CHECKS = {
    "changing-source": check_changing_source,
    "copy": check_copy,
    "crc32c": check_crc32c,
    "names": check_names,
    "write-back-address": check_write_back_address,
}


def main() -> int:
    try:
        routines()
    except UsageError as error:
        print(error)
        return LACKING
    failures = CHECKS[sys.argv[1]]() + check_names()
    print("\n".join(failures[:20]) or f"{sys.argv[1]}: nothing found; {routines()}; seed {SEED}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
