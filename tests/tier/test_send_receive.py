"""``cxlfs send`` and ``cxlfs receive`` as people type them, through pipes and on mounts."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import subprocess
from pathlib import Path

import pytest

from cxlfs.errors import NotSendableError
from cxlfs.tier import inventory, receive, send, survey
from tests.support.cli import PROGRAM, Run, assert_two_lines
from tests.support.mount import Workplace, wait_until, why_not_mountable, workplace
from tests.support.tier import SIZES, contents, make_checkpoint, stream_of


def receive_program(
    there: Path, stream: bytes, *arguments: str
) -> subprocess.CompletedProcess[bytes]:
    command = [*PROGRAM, "receive", str(there), *arguments]
    return subprocess.run(command, input=stream, capture_output=True, check=False, timeout=60)


def test_through_a_pipe(step: Path, there: Path) -> None:
    sender = subprocess.Popen([*PROGRAM, "send", str(step)], stdout=subprocess.PIPE)
    with sender:
        done = subprocess.run(
            [*PROGRAM, "receive", str(there), "--json"],
            stdin=sender.stdout,
            capture_output=True,
            check=True,
        )
    assert sender.returncode == 0
    found = json.loads(done.stdout)
    assert (found["schema"], found["path"]) == ("cxlfs.receive/1", f"{there}/step-1")
    assert (found["received_bytes"], found["taken_files"]) == (sum(SIZES.values()) + 3, 0)
    assert contents(there / "step-1") == contents(step)


def test_only_what_is_missing(run: Run, tmp_path: Path, step: Path, there: Path) -> None:
    receive(there, io.BytesIO(stream_of(step)))
    have = tmp_path / "have.json"
    have.write_text(run("receive", there, "--have").stdout)
    said = run("send", step, "--base", have, "--output", tmp_path / "stream", "--json")
    found = said.document
    assert (found["schema"], found["files"], found["left_out_files"]) == (
        "cxlfs.send/1",
        0,
        len(SIZES) + 1,
    )
    done = receive_program(there, (tmp_path / "stream").read_bytes(), "--name", "copy")
    assert done.returncode == 0, done.stderr
    assert contents(there / "copy") == contents(step)


def test_errors_say_what_next(run: Run, step: Path, there: Path) -> None:
    stream = stream_of(step)
    done = receive_program(there, stream[:-2000])
    assert (done.returncode, done.stdout) == (26, b"")
    assert b"the stream ends" in done.stderr
    assert b"next: send it again; with --base" in done.stderr
    assert receive_program(there, stream).returncode == 0
    again = receive_program(there, stream)
    assert (again.returncode, b"--replace" in again.stderr) == (27, True)
    assert receive_program(there, stream, "--replace").returncode == 0
    assert run("send", step, "--json").document["id"] == "usage"
    assert_two_lines(run("receive", there, "--have", "--replace"), 2, "cxlfs receive", "--have")
    (step / "link").symlink_to("model.bin")
    assert_two_lines(run("send", step, "--output", there / "s"), 25, "cxlfs send", "link")


def test_a_send_that_fails_leaves_the_file_that_was_there(run: Run, step: Path) -> None:
    kept = step.parent / "backup.tar"
    assert run("send", step, "--output", kept).code == 0
    whole = kept.read_bytes()
    (step / "link").symlink_to("model.bin")
    assert_two_lines(run("send", step, "--output", kept), 25, "cxlfs send", "link")
    assert (kept.read_bytes(), len(list(step.parent.iterdir()))) == (whole, 2)
    (step / "link").unlink()
    (step / "new").write_bytes(b"new")
    link = step.parent / "link.tar"
    link.symlink_to("backup.tar")
    assert run("send", step, "--output", link).code == 0
    assert kept.read_bytes() == stream_of(step)


@pytest.mark.parametrize("to", ["step-1/model.bin", "step-1/new.tar", "step-1", "also/new.tar"])
def test_a_stream_does_not_go_into_its_checkpoint(run: Run, step: Path, to: str) -> None:
    (step.parent / "also").symlink_to("step-1")
    before = contents(step)
    said = run("send", step, "--output", step.parent / to)
    assert_two_lines(said, 2, "cxlfs send", "is the checkpoint, or lies in it")
    assert contents(step) == before


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_pipes_that_do_not_block(step: Path, there: Path, unbuffered: str) -> None:
    """As whoever shares a pipe can make it: nobody has taken less than was written, or sees an end
    where there is nothing yet.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    with subprocess.Popen([*PROGRAM, "receive", str(there)], stdin=reading, env=environment) as end:
        os.close(reading)
        done = subprocess.run(
            [*PROGRAM, "send", str(step)], stdout=writing, env=environment, check=False
        )
        os.close(writing)
    assert (done.returncode, end.returncode) == (0, 0)
    assert contents(there / "step-1") == contents(step)


def test_what_comes_behind_a_stream_is_told(step: Path, there: Path) -> None:
    stream = stream_of(step)
    done = receive_program(there, stream + stream, "--json")
    assert (done.returncode, json.loads(done.stdout)["id"]) == (26, "stream")
    assert b"was received; behind its stream" in done.stdout
    assert contents(there / "step-1") == contents(step)
    assert receive_program(there, stream + bytes(10_240), "--name", "filled").returncode == 0


def test_a_stream_is_not_for_a_terminal(step: Path) -> None:
    leader, follower = pty.openpty()
    command = [*PROGRAM, "send", str(step)]
    done = subprocess.run(command, stdout=follower, stderr=subprocess.PIPE, check=False)
    os.close(leader)
    os.close(follower)
    assert (done.returncode, b"not for a terminal" in done.stderr) == (2, True)


@pytest.mark.mounted
def test_between_mounts(mnt: Path, rng: random.Random) -> None:
    """Checksums are asked for, what is the same is shared, and nothing half-written goes out."""
    for name in ("from", "there"):
        (mnt / name).mkdir()
    step = make_checkpoint(mnt / "from" / "step-1", rng)
    receive(mnt / "there", io.BytesIO(stream_of(step)))
    assert contents(mnt / "there" / "step-1") == contents(step)
    received = receive(
        mnt / "there", io.BytesIO(stream_of(step, inventory(mnt / "there"))), name="again"
    )
    assert (received.received_bytes, received.taken_files) == (0, len(SIZES) + 1)
    assert contents(mnt / "there" / "again") == contents(step)
    receive(mnt / "there", io.BytesIO(stream_of(step)), replace=True)
    with (step / "model.bin").open("r+b") as file:
        file.write(b"half")
        file.flush()
        with pytest.raises(NotSendableError, match=r"model\.bin is (incomplete|being written)"):
            survey.survey(step)


@pytest.mark.mounted
def test_checksums_of_a_mount_are_asked_for(
    mnt: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_checkpoint(mnt / "step-1", rng)

    def not_read(descriptor: int) -> tuple[int, int]:
        raise AssertionError(f"descriptor {descriptor} was read")

    monkeypatch.setattr(survey, "size_and_crc32c", not_read)
    assert send(step, io.BytesIO()).files == len(SIZES) + 1


@pytest.mark.mounted
@pytest.mark.parametrize("policy", ["units=auto", "set"])
def test_what_arrives_is_no_unit_until_it_has_its_name(
    policy: str, rng: random.Random, run: Run, tmp_path: Path
) -> None:
    """On a mount that takes back units whose writers fail, what came whole stays all the same."""
    reason = why_not_mountable()
    if reason is not None:
        pytest.skip(f"cannot mount here: {reason}")
    with workplace() as place:
        place.mount(*(["units=auto"] if policy == "units=auto" else []))
        mnt = place.mountpoint
        (mnt / "run1").mkdir()
        if policy == "set":
            said = run("policy", "set", mnt / "run1", "--unit", "*", "--done", "model.bin")
            assert said.code == 0, said
        step = make_checkpoint(tmp_path / "checkpoint-7", rng)
        (step / "trainer_state.json").write_text('{"global_step": 7}')
        stream = stream_of(step)
        assert receive_program(mnt / "run1", stream[:-30_000]).returncode == 26
        had = inventory(mnt / "run1")
        assert {"model.bin", "empty"} <= {each.name for each in had if each.staged}
        received = receive(mnt / "run1", io.BytesIO(stream_of(step, had)))
        assert received.kept_files == len(had)
        place.remount()
        assert contents(mnt / "run1" / "checkpoint-7") == contents(step)


@pytest.mark.mounted
def test_a_killed_receive_goes_on(mnt: Path, rng: random.Random) -> None:
    step = make_checkpoint(mnt / "from" / "step-1", rng)
    (mnt / "there").mkdir()
    stream = stream_of(step)
    command = [*PROGRAM, "receive", str(mnt / "there")]
    tree = mnt / "there/.cxlfs-receiving/step-1/tree"
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(stream[:-30_000])
        process.stdin.flush()
        wait_until((tree / "model.bin").exists, "a file has arrived")
        process.kill()
    assert not (mnt / "there/step-1").exists()
    had = inventory(mnt / "there")
    assert {"model.bin"} <= {each.name for each in had if each.staged}
    received = receive(mnt / "there", io.BytesIO(stream_of(step, had)))
    assert received.kept_files == len(had)
    assert contents(mnt / "there" / "step-1") == contents(step)


def test_a_full_store_gives_no_name(rng: random.Random) -> None:
    """With room for a part: what is there stays, and the rest can follow when there is room."""
    reason = why_not_mountable()
    if reason is not None:
        pytest.skip(f"cannot mount here: {reason}")
    with workplace() as place:
        place.mount()
        _fill(place, rng)


def _fill(place: Workplace, rng: random.Random) -> None:
    mnt = place.mountpoint
    step = make_checkpoint(mnt / "from" / "step-1", rng, **{"large.bin": 3 << 20})
    stream = stream_of(step)
    (mnt / "there").mkdir()
    found = os.statvfs(mnt)
    filler = mnt / "filler"
    with filler.open("wb") as file:
        left = found.f_bavail * found.f_frsize - (2 << 20)
        while left > 0:
            left -= file.write(bytes(min(left, 1 << 20)))
    done = receive_program(mnt / "there", stream)
    assert done.returncode == 14, done.stderr
    assert not (mnt / "there" / "step-1").exists()
    filler.unlink()
    assert receive_program(mnt / "there", stream).returncode == 0
    assert contents(mnt / "there" / "step-1") == contents(step)
