"""SIGBUS on guarded memory is an error of the call; elsewhere it still ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.errors import MediaError
from cxlfs.native import Granularity, MappedRegion
from tests.native.compiling import compile_program, needs_compiler
from tests.native.test_region import ACCESSES

PAGE = 4096


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[MappedRegion]:
    """Four pages mapped, of which the file then loses the last two."""
    path = tmp_path / "image"
    path.write_bytes(b"a" * 4 * PAGE)
    with path.open("r+b") as file:
        handle = MappedRegion.map_handle(
            file.fileno(), 4 * PAGE, granularity=Granularity.LINE, what=str(path)
        )
        file.truncate(2 * PAGE)
    region = MappedRegion(handle)
    yield region
    region.close()


@pytest.mark.parametrize("name", ACCESSES)
@pytest.mark.parametrize(
    ("offset", "length"), [(2 * PAGE, 8), (3 * PAGE + 77, 1), (2 * PAGE - 64, 128), (0, 4 * PAGE)]
)
def test_access_beyond_a_cut_file_is_an_error(
    cut: MappedRegion, name: str, offset: int, length: int
) -> None:
    with pytest.raises(MediaError) as caught:
        ACCESSES[name](cut, offset, length)
    assert caught.value.exit_code == MediaError.exit_code
    assert cut.read(0, 2 * PAGE).count(b"a") + cut.read(0, 2 * PAGE).count(b"\0") == 2 * PAGE


def test_words_are_guarded(cut: MappedRegion) -> None:
    with pytest.raises(MediaError):
        cut.store_u64(2 * PAGE, 1)
    with pytest.raises(MediaError):
        cut.or_u64(2 * PAGE, 1)
    with pytest.raises(MediaError):
        cut.load_u64(2 * PAGE)
    cut.store_u64(2 * PAGE - 8, 1)
    assert cut.or_u64(2 * PAGE - 8, 2) == 1
    assert cut.load_u64(2 * PAGE - 8) == 3


@pytest.mark.parametrize("name", ["read", "read_into", "crc32c"])
def test_error_names_a_byte_that_faulted(cut: MappedRegion, name: str) -> None:
    with pytest.raises(MediaError) as caught:
        ACCESSES[name](cut, 2 * PAGE - 100, 300)
    assert caught.value.offset is not None
    assert caught.value.length is not None
    # Which of the missing bytes is touched first is the copy routine's choice.
    assert 2 * PAGE <= caught.value.offset < 2 * PAGE + 200
    assert caught.value.offset + caught.value.length == 2 * PAGE + 200


def test_guards_of_threads_are_their_own(cut: MappedRegion) -> None:
    """Faults on some threads, none on the others, at the same time."""
    wrong: list[str] = []
    begin = threading.Barrier(4)

    def work(number: int) -> None:
        begin.wait()
        for _ in range(300):
            try:
                cut.read(2 * PAGE * (number % 2), 2 * PAGE)
            except MediaError:
                if number % 2 == 0:
                    wrong.append("a fault of another thread")
            else:
                if number % 2 == 1:
                    wrong.append("no fault")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FOREIGN_FAULT = """
import faulthandler, mmap, os, sys, tempfile
order = sys.argv[1]
if order == "before":
    faulthandler.enable()
from cxlfs.native import Granularity, MappedRegion
region = MappedRegion(MappedRegion.anonymous_handle(4096, granularity=Granularity.LINE))
if order == "after":
    faulthandler.enable()
if order == "between":
    faulthandler.enable()
    again = MappedRegion(MappedRegion.anonymous_handle(4096, granularity=Granularity.LINE))
file = tempfile.TemporaryFile()
file.truncate(4096)
mapping = mmap.mmap(file.fileno(), 4096)
file.truncate(0)
print("alive", flush=True)
mapping[0]
print("not reached")
"""


@pytest.mark.parametrize("order", ["none", "before", "after", "between"])
def test_foreign_fault_ends_the_process_as_ever(order: str, tmp_path: Path) -> None:
    """With faulthandler enabled before or after the guard, or the guard put in place again."""
    result = subprocess.run(
        [sys.executable, "-c", FOREIGN_FAULT, order],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        timeout=60,
    )
    assert result.returncode == -signal.SIGBUS
    assert result.stdout == "alive\n"
    assert ("Fatal Python error: Bus error" in result.stderr) == (order != "none")


@needs_compiler
def test_handlers_that_hand_on_to_each_other_end(tmp_path: Path) -> None:
    program = tmp_path / "chains"
    compile_program(["chains.c"], ["persist/guard.c"], program)
    done = subprocess.run([program], check=False, timeout=60)
    assert done.returncode == -signal.SIGBUS
