"""Checkpoints on a store: damage names its tensor, commits tell two saves apart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from cxlfs.checkpoint import Level, State, catalogue, good, inspect, tidy, undo
from tests.mounted.test_damage import flip
from tests.support.checkpoints import unpack_into
from tests.support.mount import Workplace, wait_until


def test_damage_on_the_media_names_its_tensor(place: Workplace) -> None:
    place.announced.append("checksum|damage")
    directory = place.mountpoint / "run"
    directory.mkdir()
    generator = np.random.default_rng(1)
    tensors = {f"layers.{n}.w": generator.random(40_000) for n in range(4)}
    for step in (1, 2):
        data = save({name: array + step for name, array in tensors.items()})
        (directory / f"step-{step}.safetensors").write_bytes(data)
    assert good(directory)[0].path.name == "step-2.safetensors"
    pattern = (tensors["layers.2.w"] + 2)[30_000:30_004].tobytes()
    place.unmount()
    flip(place.source, pattern)
    place.mount()
    assert inspect(directory / "step-2.safetensors").words == "complete"  # type: ignore[union-attr]
    found, (newer,) = good(directory)
    assert found.path.name == "step-1.safetensors"
    assert newer.checkpoint.state is State.DAMAGED
    assert newer.checkpoint.words.startswith("damaged: tensor layers.2.w: bytes ")
    # From then on the store itself remembers it, and nobody has to read everything.
    found, (newer,) = good(directory, Level.STRUCTURE)
    assert found.path.name == "step-1.safetensors"
    assert newer.checkpoint.words.startswith("damaged: tensor layers.2.w: bytes ")
    said = subprocess.run(
        [Path(sys.executable).with_name("cxlfs"), "list", place.mountpoint, "run"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "damaged: tensor layers.2.w: bytes " in said.stdout
    (directory / "step-2.safetensors").unlink()


def test_shards_that_were_written_over_are_told_by_their_commits(place: Workplace) -> None:
    unpacked = place.source.parent / "golden"
    unpacked.mkdir()
    source = unpack_into("dcp", unpacked) / "step-7"
    path = place.mountpoint / "latest"
    path.mkdir()

    def words() -> str:
        found = inspect(path, Level.CONTENT)
        assert found is not None
        return found.words

    for name in ("__0_0.distcp", ".metadata"):  # as torch.distributed.checkpoint does
        shutil.copy(source / name, path)
    assert words() == "complete"
    shutil.copy(source / "__0_0.distcp", path)  # the next save, killed before its metadata
    assert words() == (
        "incomplete: __0_0.distcp was written after .metadata: it may be of another save"
    )
    shutil.copy(source / ".metadata", path / ".metadata.tmp")
    (path / ".metadata.tmp").rename(path / ".metadata")
    assert words() == "complete"
    copy = place.mountpoint / "copy"
    copy.mkdir()
    place.announced.append("unit-back")  # this process lives at the end, and has written no marker
    for name in (".metadata", "__0_0.distcp"):  # in the other order, all of it new
        shutil.copy(source / name, copy)
    assert inspect(copy).words == "complete"  # type: ignore[union-attr]


def test_a_killed_writer_of_a_new_file(place: Workplace) -> None:
    """The store keeps what there is, and says that it is a beginning."""
    directory = place.mountpoint / "run"
    directory.mkdir()
    data = save({"w": np.zeros(100_000)})
    (directory / "step-1.safetensors").write_bytes(data)
    torn = directory / "step-2.safetensors"
    program = "import os, sys; f = open(sys.argv[1], 'wb', 0); f.write(sys.stdin.buffer.read()); "
    program += f"os.kill(os.getpid(), {signal.SIGKILL.value})"
    subprocess.run([sys.executable, "-c", program, torn], input=data, check=False)
    wait_until(lambda: os.getxattr(torn, "user.cxlfs.state") == b"incomplete", "it is reported")
    newest, older = catalogue(directory)
    assert newest.checkpoint.words == (
        "incomplete: the writer of step-2.safetensors has not closed it, or was killed"
    )
    assert older.checkpoint.words == "complete"
    assert [Path(move.path) for move in tidy(directory).moves] == [torn]
    assert [entry.path.name for entry in catalogue(directory)] == ["step-1.safetensors"]
    undo(directory)
    assert torn.read_bytes() == data
