from __future__ import annotations

import fcntl
import json
import os
import random
import stat
import struct
import tempfile
import uuid
from pathlib import Path

import pytest

from cxlfs.media import open_media
from cxlfs.media import source as source_module
from cxlfs.media.room import VOLATILE_TEXT
from cxlfs.store import Store, StoreOptions
from cxlfs.units import MIB
from tests.support.cli import Run, assert_two_lines, run_program

SIZE = 64 * MIB


def file_of(path: Path, size_bytes: int, magic: bytes = b"", offset: int = 0) -> bytes:
    """Make a file with ``magic`` in it; returns its beginning."""
    with path.open("wb") as file:
        file.truncate(size_bytes)
        file.seek(offset)
        file.write(magic)
    return head(path)


def head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MIB)


def test_a_new_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new.cxlfs"
    said = run("mkfs", path, "--size", "64M", "--label", "ckpt ü")
    assert said.code == 0
    assert said.stderr == ""
    lines = said.stdout.splitlines()
    assert lines[0] == f"made a cxlfs store on {path}"
    assert lines[-1] == f"next: cxlfs mount {path} MOUNTPOINT"
    shown = dict(line.strip().split(": ", 1) for line in lines[1:-1])
    assert shown["label"] == "ckpt ü"
    assert shown["size"] == "64.0 MiB (67108864 bytes)"
    assert shown["segments"] == "28 of 2.0 MiB"
    assert shown["media"] == "file, page granularity, write-back msync"
    assert str(uuid.UUID(shown["uuid"])) == shown["uuid"]
    status = path.stat()
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE, "fully allocated"
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.fixture
def in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Files lie on a tmpfs, or do not, wherever the tests run."""
    kind = "tmpfs" if request.param else "ext4"
    monkeypatch.setattr(source_module, "file_system_of", lambda _descriptor: kind)
    return bool(request.param)


@pytest.mark.parametrize("in_memory", [False, True], indirect=True)
def test_a_store_in_memory_is_called_volatile(run: Run, tmp_path: Path, in_memory: bool) -> None:
    """When it is made, and whenever it is looked at, mounted or not."""
    path = tmp_path / "new.cxlfs"
    caution = f"caution: {VOLATILE_TEXT}\n"
    assert (caution in run("mkfs", path, "--size", "64M").stdout) == in_memory
    assert (caution in run("status", path).stdout) == in_memory
    found = run("status", path, "--json").document
    assert found["media"]["volatile"] == in_memory
    assert found["weakened"] == ([VOLATILE_TEXT] if in_memory else [])


@pytest.mark.parametrize("in_memory", [False, True], indirect=True)
def test_json_says_the_same(run: Run, tmp_path: Path, in_memory: bool) -> None:
    path = tmp_path / "new.cxlfs"
    found = run("mkfs", path, "--size", "64M", "--label", "x", "--json").document
    with_media = open_media(path, read_only=True)
    store = Store.open(with_media, StoreOptions(read_only=True))
    usable_bytes = store.statfs().available_bytes
    assert found == {
        "schema": "cxlfs.mkfs/1",
        "source": str(path),
        "uuid": str(uuid.UUID(bytes=store.superblock.uuid)),
        "label": "x",
        "format_version": 1,
        "size_bytes": SIZE,
        "segment_size_bytes": 2 * MIB,
        "segments": 28,
        "usable_bytes": usable_bytes,
        "media": "file",
        "granularity": "page",
        "write_back": "msync",
        "persistence_domain": None,
        "volatile": in_memory,
        "created_file": True,
        "overwrote": [],
    }
    store.close()
    with_media.close()
    assert SIZE // 4 < usable_bytes < SIZE


def test_an_existing_file_is_used_as_it_is(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "old"
    file_of(path, SIZE)
    found = run("mkfs", path, "--json").document
    assert (found["created_file"], found["size_bytes"]) == (False, SIZE)
    assert path.stat().st_blocks * 512 >= SIZE, "no hole is left to run out of space in"


def test_an_empty_file_takes_the_size(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert run("mkfs", path, "--size", "64M").code == 0
    assert path.stat().st_size == SIZE


# --- refusals -----------------------------------------------------------------------------------


def test_a_missing_source_without_a_size(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "missing"
    said = run("mkfs", path)
    assert_two_lines(said, 16, "cxlfs mkfs", f"{path} does not exist", f"mkfs {path} --size")
    assert not path.exists()


@pytest.mark.parametrize("size", [[], ["--size", "64M"]])
def test_a_mistyped_device_is_not_made_a_file(run: Run, size: list[str]) -> None:
    said = run("mkfs", "/dev/dax987.0", *size)
    assert_two_lines(said, 16, "cxlfs mkfs", "no device /dev/dax987.0", "daxctl")
    assert not Path("/dev/dax987.0").exists()


def test_a_missing_directory(run: Run, tmp_path: Path) -> None:
    said = run("mkfs", tmp_path / "no" / "file", "--size", "64M")
    assert_two_lines(said, 16, "cxlfs mkfs", "No such file or directory")


def test_a_directory(run: Run, tmp_path: Path) -> None:
    said = run("mkfs", tmp_path, "--size", "64M")
    assert_two_lines(said, 16, "cxlfs mkfs", "is a directory", f"{tmp_path}/store.cxlfs")


def test_a_character_device(run: Run) -> None:
    assert_two_lines(run("mkfs", "/dev/null"), 16, "cxlfs mkfs", "/dev/null")


@pytest.mark.parametrize("size", ["1M", "39M", "0", "1"])
def test_too_small(run: Run, tmp_path: Path, size: str) -> None:
    path = tmp_path / "small"
    said = run("mkfs", path, "--size", size)
    assert_two_lines(said, 2, "cxlfs mkfs", "too small", "at least 40.0 MiB")
    assert not path.exists(), "no file is left behind"


def test_the_smallest_size(run: Run, tmp_path: Path) -> None:
    assert run("mkfs", tmp_path / "small", "--size", "40M").code == 0


def test_an_existing_file_too_small(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "small"
    before = file_of(path, MIB, b"mine")
    assert_two_lines(run("mkfs", path), 2, "cxlfs mkfs", "too small")
    assert head(path) == before


@pytest.mark.parametrize("size", ["", "lots", "4 GiBs", "-5M", "1e9", "4G4", "٤G", "9" * 400])
def test_bad_size_text(run: Run, tmp_path: Path, size: str) -> None:
    said = run("mkfs", tmp_path / "x", f"--size={size}")
    assert_two_lines(said, 2, "cxlfs mkfs", "not a size", "write it like 512M or 4G")
    assert not (tmp_path / "x").exists()


def test_a_size_beyond_the_file_system(run: Run, tmp_path: Path) -> None:
    said = run("mkfs", tmp_path / "huge", "--size", "4096P")
    assert said.code == 14
    assert len(said.stderr.splitlines()) == 2
    assert not (tmp_path / "huge").exists()


def test_another_size_than_the_file_has(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "old"
    before = file_of(path, SIZE, b"mine")
    said = run("mkfs", path, "--size", "128M")
    assert_two_lines(said, 2, "cxlfs mkfs", f"exists already, with {SIZE} bytes")
    assert (head(path), path.stat().st_size) == (before, SIZE)


@pytest.mark.parametrize("label", ["x" * 65, "ü" * 33])
def test_a_label_too_long(run: Run, tmp_path: Path, label: str) -> None:
    said = run("mkfs", tmp_path / "x", "--size", "64M", "--label", label)
    assert_two_lines(said, 2, "cxlfs mkfs", "longer than 64 bytes")
    assert not (tmp_path / "x").exists()


def test_a_label_that_would_steer_a_terminal(run: Run, tmp_path: Path) -> None:
    said = run("mkfs", tmp_path / "x", "--size", "64M", "--label", "a\x1b[2J")
    assert_two_lines(said, 2, "cxlfs mkfs", "control characters")


def test_a_source_without_write_permission() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to others
        directory = Path(name)
        directory.chmod(0o755)
        file_of(directory / "theirs", SIZE)
        (directory / "theirs").chmod(0o444)
        said = run_program("mkfs", directory / "theirs", user=65534)
        assert_two_lines(said, 16, "cxlfs mkfs", f"{directory}/theirs", "Permission denied")
        said = run_program("mkfs", directory / "new", "--size", "64M", user=65534)
        assert_two_lines(said, 16, "cxlfs mkfs", f"{directory}/new", "Permission denied")


# --- what is there already ----------------------------------------------------------------------

SIGNATURES = [
    (b"\x53\xef", 0x438, "ext2, ext3 or ext4 (at byte 1080)"),
    (b"XFSB", 0, "XFS"),
    (b"LABELONE", 512, "LVM physical volume"),
    (b"LUKS\xba\xbe", 0, "LUKS"),
    (b"\xfc\x4e\x2b\xa9\x01\0\0\0", 4096, "MD RAID member"),
    (b"SWAPSPACE2", 4086, "swap space"),
    (b"EFI PART", 512, "GPT partition table"),
    (b"PK\x03\x04", 0, "zip archive"),
    (b"_BHRfS_M", 64 * 1024 + 64, "btrfs"),
]


@pytest.mark.parametrize(("magic", "offset", "name"), SIGNATURES)
def test_nothing_known_is_overwritten(
    run: Run, tmp_path: Path, magic: bytes, offset: int, name: str
) -> None:
    path = tmp_path / "theirs"
    before = file_of(path, SIZE, magic, offset)
    said = run("mkfs", path)
    assert_two_lines(said, 19, "cxlfs mkfs", "holds something", name, "--force")
    assert head(path) == before
    assert run("mkfs", path, "--json").document["id"] == "source-occupied"


def test_force_overwrites_and_takes_the_old_magic_away(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    file_of(path, SIZE, b"\x53\xef", 0x438)
    said = run("mkfs", path, "--force")
    assert said.code == 0
    assert "overwrote: ext2, ext3 or ext4" in said.stdout
    assert head(path)[0x438:0x43A] == b"\0\0"
    assert run("status", path).code == 0


def test_a_store_is_not_overwritten(run: Run, source: Path) -> None:
    before = run("status", source, "--json").document
    said = run("mkfs", source)
    assert_two_lines(said, 19, "cxlfs mkfs", "cxlfs store (at byte 0)")
    assert run("status", source, "--json").document["uuid"] == before["uuid"]


@pytest.mark.parametrize("kept_copy", [0, 2 * MIB, SIZE - 4 * MIB, SIZE - 2 * MIB])
def test_one_superblock_copy_is_enough_to_be_a_store(
    run: Run, source: Path, kept_copy: int
) -> None:
    with source.open("r+b") as file:
        for offset in {0, 2 * MIB, SIZE - 4 * MIB, SIZE - 2 * MIB} - {kept_copy}:
            file.seek(offset)
            file.write(bytes(512))
    assert_two_lines(run("mkfs", source), 19, "cxlfs mkfs", "cxlfs store")


def test_force_makes_a_new_store(run: Run, source: Path) -> None:
    before = run("status", source, "--json").document
    found = run("mkfs", source, "--force", "--json").document
    assert found["overwrote"] == ["cxlfs store"]
    after = run("status", source, "--json").document
    assert after["uuid"] == found["uuid"] != before["uuid"]
    assert after["label"] == ""


def test_content_of_an_unknown_kind_is_somebodys_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "noise"
    noise = bytes(5000) + random.Random(11).randbytes(SIZE - 5000)
    path.write_bytes(noise)
    said = run("mkfs", path)
    assert_two_lines(said, 19, "cxlfs mkfs", "data of an unknown kind (at byte 5000)", "--force")
    assert path.read_bytes() == noise
    found = run("mkfs", path, "--force", "--json").document
    assert found["overwrote"] == ["data of an unknown kind"]
    assert run("list", path).stdout == "no checkpoints in /\n"


def test_a_source_that_a_program_can_store_into_is_left_as_it_is(run: Run, source: Path) -> None:
    before = source.read_bytes()
    with source.open("r+b") as file:
        lock = struct.pack("=hh4xqqi4x", fcntl.F_RDLCK, 0, 8 << 20, 4096, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        said = run("mkfs", source, "--force")
        assert_two_lines(said, 11, "cxlfs mkfs", "a program still has 4.0 KiB", "fuser")
    assert source.read_bytes() == before
    assert run("mkfs", source, "--force").code == 0


def test_force_does_not_break_a_lock(run: Run, source: Path) -> None:
    media = open_media(source)
    said = run("mkfs", source, "--force")
    media.close()
    assert_two_lines(said, 11, "cxlfs mkfs", "in use", str(os.getpid()))


def test_a_source_name_that_is_not_utf8(run: Run, tmp_path: Path) -> None:
    path = os.fsdecode(bytes(tmp_path) + b"/st\xffre")
    said = run_program("mkfs", path, "--size", "64M", "--json")
    found = json.loads(said.stdout)
    assert found["source"].endswith("st\\xffre")
    assert found["source_b64"]
    assert "st\\xffre" in run("status", path).stdout
