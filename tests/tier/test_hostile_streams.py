"""Streams that somebody made to do harm, and streams that were damaged on the way: each is refused,
and nothing is written but below the staging directory.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import pytest

from cxlfs.errors import NotSendableError, StreamError
from cxlfs.tier import archive, decode_inventory, receive
from cxlfs.tier.manifest import FORMAT, decode
from cxlfs.tier.survey import survey
from tests.support.tier import contents, make_checkpoint, stream_of


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_cut_is_an_error(tmp_path: Path, there: Path) -> None:
    path = tmp_path / "small"
    path.mkdir()
    (path / "a").write_bytes(b"abc")
    (path / "b").write_bytes(bytes(700))
    stream = stream_of(path)
    for cut in {*range(0, len(stream), 97), len(stream) - 1}:
        with pytest.raises(StreamError, match=r"ends|is no stream"):
            receive(there, io.BytesIO(stream[:cut]))
    assert [name for name in names_in(there) if not name.startswith(".cxlfs-")] == []


def test_every_changed_byte_is_found(tmp_path: Path, there: Path, rng: random.Random) -> None:
    """Nothing of a stream is read that is not compared: a changed one is refused, or makes the very
    same checkpoint of another name or time (which are the manifest's to say).
    """
    path = tmp_path / "small"
    path.mkdir()
    (path / "a").write_bytes(b"abc" * 100)
    stream, wanted = stream_of(path), contents(path)
    for at in sorted(rng.sample(range(len(stream)), 400)):
        broken = bytearray(stream)
        broken[at] ^= 1 << rng.randrange(8)
        try:
            received = receive(there, io.BytesIO(bytes(broken)))
        except StreamError:
            continue
        assert list(contents(received.path).values()) == list(wanted.values())
        shutil.rmtree(received.path)
    assert set(names_in(there)) <= {".cxlfs-receiving"}


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "a/../../x",
        "",
        "a//b",
        "a\0b",
        "a\x1b[2J",
        "\ud800",
        ".",
        "..",
        ".cxlfs-aside/x",
        "y" * 256,
    ],
)
def test_names_that_lead_elsewhere(step: Path, there: Path, name: str) -> None:
    manifest = json.loads(survey(step).encode())
    manifest["files"][0]["name"] = name
    assert_refused(manifest, there)


def test_names_that_lead_too_deep(tmp_path: Path, step: Path, there: Path) -> None:
    """What goes down a tree with a frame for each directory, shutil.rmtree, could not remove it."""
    deepest = ["/".join("a" * depth) for depth in range(1, 1000)]
    assert_refused({**json.loads(survey(step).encode()), "directories": deepest}, there)
    path = tmp_path / "deep"
    (path / deepest[98]).mkdir(parents=True)
    (path / deepest[97] / "file").write_bytes(b"data")
    assert decode(survey(path).encode()) == survey(path)
    (path / deepest[98] / "file").write_bytes(b"data")
    (path / deepest[100]).mkdir(parents=True)
    with pytest.raises(NotSendableError, match="more than 99 directories deep"):
        survey(path)


def assert_refused(manifest: dict[str, object], there: Path) -> None:
    data = json.dumps(manifest).encode()
    with pytest.raises(StreamError, match="the manifest: "):
        decode(data)
    assert contents(there) == {}


@pytest.mark.parametrize("name", ["../step", "a/b", "", "..", ".cxlfs-x", "z" * 256])
def test_a_checkpoint_that_would_lie_elsewhere(step: Path, there: Path, name: str) -> None:
    assert_refused({**json.loads(survey(step).encode()), "name": name}, there)
    with pytest.raises(StreamError, match="the name"):
        receive(there, io.BytesIO(stream_of(step)), name=name)


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": -1},
        {"size_bytes": 1 << 63},
        {"size_bytes": 1.5},
        {"size_bytes": True},
        {"crc32c": 1 << 32},
        {"sha256": "ff"},
        {"sha256": "G" * 64},
        {"base": ""},
        {"base": "../other", "sha256": "f" * 64},
        {"base": 3},
        {"name": "nothing"},
        {"name": "model.bin/below"},
        {"more": 1},
    ],
)
def test_numbers_and_texts_are_bounded(step: Path, there: Path, change: dict[str, object]) -> None:
    manifest = json.loads(survey(step).encode())
    manifest["files"][0].update(change)
    if change.get("name") == "model.bin/below":
        manifest["files"][0], manifest["files"][1] = manifest["files"][1], manifest["files"][0]
    assert_refused(manifest, there)


def test_another_format_or_none(step: Path, there: Path) -> None:
    manifest = json.loads(survey(step).encode())
    assert_refused({**manifest, "format": FORMAT + 1}, there)
    assert_refused({**manifest, "is_directory": False}, there)
    assert_refused({**manifest, "directories": [*manifest["directories"], "optim"]}, there)
    for data in (b"", b"[]", b"[" * 100_000, b"{", b"\xff"):
        with pytest.raises(StreamError):
            decode(data)
        with pytest.raises(StreamError, match="the inventory"):
            decode_inventory(data)


def test_a_manifest_of_any_size_is_not_read(there: Path) -> None:
    """The header says 8 GiB; nothing of it is asked for."""

    class Endless(io.RawIOBase):
        taken = 0

        def read(self, size: int = -1) -> bytes:
            if not self.taken:
                self.taken = 512
                return archive._header(".cxlfs-manifest.json", 8**11 - 1, 0, b"0")
            raise AssertionError(f"{size} bytes were asked for")

    with pytest.raises(StreamError, match="8589934591 bytes, more than"):
        receive(there, Endless())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (b"2", "a symbolic link"),
        (b"3", "a device"),
        (b"1", "a hard link"),
        (b"L", "something else"),
    ],
)
def test_other_members_are_refused(step: Path, there: Path, kind: bytes, words: str) -> None:
    """A link or device in the place of a file, as an archive of somebody else may have it."""
    stream = bytearray(stream_of(step))
    at = stream.index(b"step-1/model.bin")
    stream[at + 156 : at + 157] = kind
    with pytest.raises(StreamError, match=f"the stream has {words} where model.bin has to be"):
        receive(there, io.BytesIO(bytes(stream)))


def test_a_manifest_and_a_stream_of_two_checkpoints(
    tmp_path: Path, step: Path, there: Path, rng: random.Random
) -> None:
    other = make_checkpoint(tmp_path / "other" / "step-1", rng)
    manifest = archive.beginning(survey(step))
    foreign = stream_of(other)[len(archive.beginning(survey(other))) :]
    with pytest.raises(StreamError, match="its bytes are not what was announced"):
        receive(there, io.BytesIO(manifest + foreign))
    assert not (there / "step-1").exists()
