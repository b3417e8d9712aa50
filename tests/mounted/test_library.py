"""Programs without Python on real mounts, with the client library as it is installed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client_library import (
    EXAMPLE_SAYS,
    SCENES,
    example,
    failures,
    needs_compilers,
    program,
)
from tests.support.mount import MIB, Workplace
from tests.support.repository import ROOT

pytestmark = needs_compilers
PROGRAM = ROOT / "tests/client/program.c"


@pytest.mark.large_store
def test_every_call_does_what_it_does_elsewhere(place: Workplace) -> None:
    place.announced.append("reverted: the previous version is back")
    path = place.mountpoint / "file"
    for scene in SCENES:
        assert failures(program(PROGRAM), scene, path, "direct") == "", scene
        path.unlink(missing_ok=True)


def test_the_same_in_cxx(place: Workplace) -> None:
    for scene in ("threads", "map"):
        binary = program(PROGRAM, "c++")
        assert failures(binary, scene, place.mountpoint / scene, "direct") == "", scene


@contextlib.contextmanager
def damaged(place: Workplace, path: Path) -> Iterator[int]:
    """Where one byte of the file is not what was written."""
    place.announced.append("damage|checksum|data")
    data = path.read_bytes()
    file_at = 4 * MIB + 99
    source_at = place.source.read_bytes().find(data[file_at : file_at + 1000])
    assert source_at > 0
    with place.source.open("r+b", buffering=0) as source:
        os.pwrite(source.fileno(), bytes([data[file_at] ^ 1]), source_at)
        try:
            yield file_at
        finally:
            os.pwrite(source.fileno(), data[file_at : file_at + 1], source_at)


def test_damage_is_found(place: Workplace) -> None:
    path = place.mountpoint / "file"
    assert failures(program(PROGRAM), "save", path, "direct") == ""
    with damaged(place, path) as offset:
        assert failures(program(PROGRAM), "damage", path, "direct", offset) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_somebody_else_goes_through_the_kernel(unmounted: Workplace) -> None:
    unmounted.mount("allow_other")
    unmounted.mountpoint.chmod(0o777)
    path = unmounted.mountpoint / "file"
    assert failures(program(PROGRAM), "save", path, "kernel", user=65534) == ""
    with damaged(unmounted, path) as offset:
        assert failures(program(PROGRAM), "damage", path, "kernel", offset, user=65534) == ""


@pytest.mark.large_store
def test_the_example_of_the_document_says_what_is_there(place: Workplace) -> None:
    path = place.mountpoint / "weights"
    done = subprocess.run([example(), path], capture_output=True, text=True, check=True)
    assert tuple(done.stdout.splitlines()) == EXAMPLE_SAYS
    path.unlink()
