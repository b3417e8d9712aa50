"""Send and receive: what arrives is what was sent, whole under its name, or nothing has a name."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from cxlfs.errors import (
    BusyError,
    CheckpointExistsError,
    CxlfsError,
    NoSpaceError,
    NotSendableError,
    StreamError,
)
from cxlfs.tier import archive, decode_inventory, inventory, receive, send
from cxlfs.tier.manifest import File, Manifest, decode
from cxlfs.tier.survey import Progress
from tests.support.tier import LONG, SIZES, Dribble, contents, stream_of


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_arrives_is_what_was_sent(step: Path, there: Path, rng: random.Random) -> None:
    os.utime(step / "model.bin", ns=(5, 1_700_000_000_123_456_789))
    received = receive(there, Dribble(stream_of(step), rng))
    assert received.path == there / "step-1"
    assert (received.files, received.size_bytes) == (len(SIZES) + 1, sum(SIZES.values()) + 3)
    assert contents(there / "step-1") == contents(step)
    assert (there / "step-1" / "model.bin").stat().st_mtime_ns == 1_700_000_000_123_456_789
    assert names_in(there) == ["step-1"]


def test_a_checkpoint_of_one_file(tmp_path: Path, there: Path) -> None:
    path = tmp_path / "step-2.bin"
    path.write_bytes(bytes(range(256)) * 9)
    stream = stream_of(path)
    receive(there, io.BytesIO(stream))
    receive(there, io.BytesIO(stream), name="another.bin")
    assert (there / "another.bin").read_bytes() == path.read_bytes()
    assert names_in(there) == ["another.bin", "step-2.bin"]


@pytest.mark.parametrize("program", ["tar", "bsdtar"])
def test_other_programs_read_the_stream(step: Path, there: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    stream = stream_of(step)
    subprocess.run([program, "-xf", "-", "-C", there], input=stream, check=True)
    assert contents(there / "step-1") == contents(step)
    listed = subprocess.run([program, "-tf", "-"], input=stream, capture_output=True, check=True)
    assert listed.stdout.splitlines()[0] == b".cxlfs-manifest.json"
    assert listed.stderr == b""
    assert decode((there / ".cxlfs-manifest.json").read_bytes()).name == "step-1"


def test_what_the_header_has_no_room_for() -> None:
    """9 GiB and a time far ahead: GNU tar reads the headers."""
    file = File("", 9 << 30, 0, 1 << 62)
    manifest = Manifest("large", is_directory=False, directories=(), files=(file,))
    head = archive.beginning(manifest) + archive.member(manifest, file)
    listed = subprocess.run(["tar", "-tvf", "-"], input=head, capture_output=True, check=False)
    assert b" 9663676416 2116-" in listed.stdout


# --- only what is missing ---------------------------------------------------------------------


def test_what_the_other_side_has_is_not_sent(
    tmp_path: Path, step: Path, there: Path, rng: random.Random
) -> None:
    receive(there, io.BytesIO(stream_of(step)))
    following = tmp_path / "from" / "step-2"
    shutil.copytree(step, following)
    (following / "model.bin").write_bytes(rng.randbytes(300_000))
    stream = stream_of(following, inventory(there))
    assert len(stream) < 310_000
    received = receive(there, io.BytesIO(stream))
    assert (received.received_bytes, received.taken_files) == (300_000, len(SIZES))
    assert contents(there / "step-2") == contents(following)
    assert contents(there / "step-1") == contents(step)


def test_a_base_that_is_another_content_is_found(step: Path, there: Path) -> None:
    """The inventory said the same size and CRC32C; SHA-256 tells."""
    receive(there, io.BytesIO(stream_of(step)))
    had = inventory(there)
    (there / "step-1" / "optim/state-1.bin").write_bytes(bytes(512))
    with pytest.raises(StreamError, match=r"is not the optim/state-1\.bin that was left out"):
        receive(there, io.BytesIO(stream_of(step, had)), name="again")
    shutil.rmtree(there / "step-1" / "optim")
    with pytest.raises(StreamError, match="left out"):
        receive(there, io.BytesIO(stream_of(step, had)), name="again")
    assert not (there / "again").exists()


@pytest.mark.parametrize("is_directory", [True, False])
def test_it_goes_on_where_it_broke_off(
    step: Path, there: Path, rng: random.Random, is_directory: bool
) -> None:
    path = step if is_directory else step / "model.bin"
    stream = stream_of(path)
    cut = rng.randrange(len(stream))
    with pytest.raises(StreamError):
        receive(there, io.BytesIO(stream[:cut]))
    assert [name for name in names_in(there) if not name.startswith(".cxlfs-")] == []
    had = inventory(there)
    rest = stream_of(path, had)
    assert len(rest) < len(stream) + 2000  # a SHA-256 for each that is left out
    received = receive(there, io.BytesIO(rest))
    assert received.kept_files == len(had)
    assert contents(there / path.name) == contents(path)
    assert names_in(there) == [path.name]


def test_what_was_kept_counts_for_its_own_checkpoint_alone(step: Path, there: Path) -> None:
    with pytest.raises(StreamError):
        receive(there, io.BytesIO(stream_of(step)[:-1000]))
    assert all(each.staged for each in inventory(there))
    other = step.with_name("step-9")
    shutil.copytree(step, other)
    receive(there, io.BytesIO(stream_of(other, inventory(there))))
    assert contents(there / "step-9") == contents(step)


def test_what_was_kept_and_damaged_is_sent_again(step: Path, there: Path) -> None:
    with pytest.raises(StreamError):
        receive(there, io.BytesIO(stream_of(step)[:-1000]))
    had = inventory(there)
    kept = there / ".cxlfs-receiving/step-1/tree/model.bin"
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    with pytest.raises(StreamError, match=r"model.bin was left out .* not here any more"):
        receive(there, io.BytesIO(stream_of(step, had)))
    receive(there, io.BytesIO(stream_of(step, inventory(there))))
    assert contents(there / "step-1") == contents(step)


def test_remains_of_another_content_do_not_stay(
    step: Path, there: Path, rng: random.Random
) -> None:
    """Files where directories are to be, names that are gone: nothing but the manifest's."""
    tree = there / ".cxlfs-receiving/step-1/tree"
    (tree / "model.bin/was/a/directory").mkdir(parents=True)
    (tree / "optim").write_bytes(b"was a file")
    (tree / "old").write_bytes(b"gone")
    (tree / "nothing").symlink_to(step)
    receive(there, Dribble(stream_of(step), rng))
    assert contents(there / "step-1") == contents(step)
    assert contents(step)["nothing"] is None


# --- names --------------------------------------------------------------------------------------


def test_an_existing_one_is_not_replaced_unless_asked(
    step: Path, there: Path, rng: random.Random
) -> None:
    (there / "step-1").mkdir()
    (there / "step-1" / "old").write_bytes(b"old")
    stream = stream_of(step)
    pipe = Dribble(stream, rng)
    with pytest.raises(CheckpointExistsError):
        receive(there, pipe)
    assert pipe.taken < len(stream) / 2  # not after all of it has come
    assert contents(there / "step-1") == {"old": b"old"}
    assert names_in(there) == ["step-1"]
    receive(there, io.BytesIO(stream), replace=True)
    assert contents(there / "step-1") == contents(step)
    assert names_in(there) == ["step-1"]


def test_one_that_appears_meanwhile_is_not_replaced(step: Path, there: Path) -> None:
    stream = stream_of(step)

    def appear(*_: object) -> None:
        (there / "step-1").mkdir(exist_ok=True)

    with pytest.raises(CheckpointExistsError):
        receive(there, io.BytesIO(stream), progress=appear)
    assert contents(there / "step-1") == {}


def test_a_checkpoint_has_its_name_with_all_its_files_or_not_at_all(
    step: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever call fails, the directory has nothing under the name, or everything."""
    stream, wanted = stream_of(step), contents(step)
    calls = 0

    def failing(name: str, at: int) -> None:
        original = getattr(os, name)

        def call(*arguments: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(errno.EIO, "planted")
            return original(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    for at in range(1, 60):
        calls = 0
        for name in ("fsync", "write", "utime", "mkdir"):
            failing(name, at)
        try:
            receive(there, io.BytesIO(stream))
        except OSError:
            ended = False
        else:
            ended = True
        monkeypatch.undo()
        if (there / "step-1").exists():
            assert contents(there / "step-1") == wanted
            shutil.rmtree(there / "step-1")
        else:
            assert not ended
        if ended and calls < at:
            return
    pytest.fail("the calls never came to an end")


def test_one_process_at_a_time(step: Path, there: Path) -> None:
    stream = stream_of(step)
    reader, writer = os.pipe()
    begun = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with open(reader, "rb", buffering=0) as pipe:  # noqa: PTH123
                receive(there, pipe, progress=lambda *_: begun.set())
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    with open(writer, "wb") as pipe:  # noqa: PTH123
        pipe.write(stream[:100_000])
        pipe.flush()
        assert begun.wait(30)
        with pytest.raises(BusyError, match="step-1 is being received"):
            receive(there, io.BytesIO(stream))
        pipe.write(stream[100_000:])
    thread.join(30)
    assert not errors
    assert contents(there / "step-1") == contents(step)


@pytest.mark.parametrize("name", [".cxlfs-receiving", "step-1"])
def test_the_place_goes_when_another_receive_ends(
    step: Path, there: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Between two calls of one that begins: that is not its error."""
    original, gone = Path.mkdir, list[Path]()

    def mkdir(self: Path, *arguments: object, **others: object) -> None:
        original(self, *arguments, **others)  # type: ignore[arg-type]
        if self.name == name and not gone:
            self.rmdir()
            gone.append(self)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    receive(there, io.BytesIO(stream_of(step)))
    assert contents(there / "step-1") == contents(step)
    assert gone


def test_a_directory_that_is_not_there_is_not_made(step: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        receive(tmp_path / "no" / "mount", io.BytesIO(stream_of(step)))
    assert not (tmp_path / "no").exists()


def test_a_full_file_system(step: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(step)
    found = os.statvfs(there)
    small = os.statvfs_result((*found[:4], 10, *found[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: small)
        with pytest.raises(NoSpaceError, match=r"room for \d+ bytes, and 3\d+ are to come"):
            receive(there, io.BytesIO(stream))

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpaceError, match="no name was given"):
        receive(there, io.BytesIO(stream))
    assert names_in(there) == [".cxlfs-receiving"]


def test_a_link_in_the_place_of_the_staging_directory(
    step: Path, there: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (there / ".cxlfs-receiving").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CxlfsError, match="symbolic link"):
        receive(there, io.BytesIO(stream_of(step)))
    assert contents(tmp_path / "elsewhere") == {}


# --- what is not sent ---------------------------------------------------------------------------


def test_links_and_pipes_are_refused(step: Path) -> None:
    (step / "link").symlink_to("/etc/passwd")
    with pytest.raises(NotSendableError, match="link: neither a file nor a directory"):
        stream_of(step)
    (step / "link").unlink()
    os.mkfifo(step / "pipe")
    with pytest.raises(NotSendableError, match="pipe: neither"):
        stream_of(step)


def test_what_a_place_keeps_for_itself_stays(step: Path, there: Path) -> None:
    wanted = contents(step)
    (step / ".cxlfs-aside").mkdir()
    (step / ".cxlfs-aside" / "old").write_bytes(b"old")
    receive(there, io.BytesIO(stream_of(step)))
    assert contents(there / "step-1") == wanted


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-3.npz"
    np.savez(path, w=np.arange(1000.0))
    os.truncate(path, 5000)
    with pytest.raises(NotSendableError, match="is incomplete"):
        stream_of(path)


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_a_file_that_changes_on_the_way_is_never_whole(
    step: Path, there: Path, change: str
) -> None:
    path = step / "model.bin"
    data = path.read_bytes()
    changed = {"longer": data + b"x", "shorter": data[:-1], "other": data[:-1] + b"?"}[change]
    stream = io.BytesIO()
    with pytest.raises(NotSendableError, match="it changed while it was read"):
        send(step, stream, progress=_behind_all(path, changed, len(SIZES) + 1))
    with pytest.raises(StreamError):
        receive(there, io.BytesIO(stream.getvalue()))
    assert not (there / "step-1").exists()


def _behind_all(path: Path, data: bytes, files: int) -> Progress:
    seen = 0

    def progress(activity: str, _done: int, _total: int) -> None:
        nonlocal seen
        seen += activity == "checksums"
        if seen == files:
            path.write_bytes(data)

    return progress


def test_an_inventory_is_read_back(step: Path, there: Path) -> None:
    receive(there, io.BytesIO(stream_of(step)))
    had = inventory(there)
    plain = {"schema": "cxlfs.inventory/1", "files": [dataclasses.asdict(each) for each in had]}
    assert decode_inventory(json.dumps(plain).encode()) == had
    assert {each.name for each in had} == {*SIZES, LONG}
