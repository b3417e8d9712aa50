"""Manifests: what they say, what a comparison finds, who signed them, and hostile ones."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cxlfs.checkpoint.model import BeyondLimitsError
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.tensors import compare, decode_manifest, manifest_of, sha256_lines
from cxlfs.checkpoint.tensors.blocks import TASK_BYTES
from cxlfs.checkpoint.tensors.sums import file_sums, joined
from cxlfs.errors import FrameworkMissingError, ManifestError, UsageError
from cxlfs.native import crc32c
from tests.support.checkpoints import CASES, Case

from .conftest import Unpack


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    path = tmp_path / "step-7"
    path.mkdir()
    for number in (1, 2):
        values = {f"w{number}": np.arange(5000.0), f"b{number}": np.arange(30, dtype=np.float32)}
        save_file(values, path / f"model-0000{number}-of-00002.safetensors")
    names = {f"{k}{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2) for k in "wb"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def test_a_manifest_says_what_is_there(saved: Path) -> None:
    found = manifest_of(saved, with_sha256=True)
    assert (found.name, found.kind, found.is_directory) == ("step-7", "safetensors-sharded", True)
    assert [file.name for file in found.files] == sorted(each.name for each in saved.iterdir())
    for file in found.files:
        data = (saved / file.name).read_bytes()
        assert (file.size_bytes, file.crc32c) == (len(data), f"{crc32c(data):08x}")
    assert {tensor.name for tensor in found.tensors} == {"w1", "w2", "b1", "b2"}
    for tensor in found.tensors:
        (part,) = tensor.parts
        data = (saved / part.file).read_bytes()[part.offset : part.offset + part.size_bytes]
        assert part.crc32c == f"{crc32c(data):08x}"
    assert decode_manifest(found.encode()) == found
    assert compare(found, saved) == ([], [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_checkpoints_have_manifests(unpack: Unpack, case: Case) -> None:
    path = unpack(case.archive) / case.path
    found = manifest_of(path)
    assert found.files
    assert decode_manifest(found.encode()).id == found.id
    assert compare(found, path if path.is_dir() else path.parent)[0] == []


def test_any_directory_has_a_manifest_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "text").write_text("hello")
    (tmp_path / "empty").write_text("")
    found = manifest_of(tmp_path)
    assert [(file.name, file.size_bytes) for file in found.files] == [
        ("empty", 0),
        ("inside/text", 5),
    ]
    assert found.tensors == ()
    assert found.kind is None


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff")).write_text("")
    with pytest.raises(BeyondLimitsError, match="not UTF-8"):
        manifest_of(tmp_path)


@pytest.mark.parametrize(
    ("offset", "tensor"), [(-4, "w1"), (-40_100, "b1"), (4, None)], ids=["w", "b", "header"]
)
def test_a_changed_byte_is_found_with_its_tensor(
    saved: Path, offset: int, tensor: str | None
) -> None:
    manifest = manifest_of(saved)
    path = saved / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    order = sorted(
        (p.offset, t.name) for t in manifest.tensors for p in t.parts if p.file == path.name
    )
    assert [name for _, name in order] in (["b1", "w1"], ["w1", "b1"])
    at = len(data) + offset if offset < 0 else offset
    data[at] ^= 1
    path.write_bytes(data)
    (found,) = compare(manifest, saved)[0]
    inside = [
        t.name
        for t in manifest.tensors
        for p in t.parts
        if p.file == path.name and p.offset <= at < p.offset + p.size_bytes
    ]
    assert (found.id, found.file) == ("file-checksum", path.name)
    assert found.tensor == (inside[0] if inside else None)
    assert (tensor is None) is (not inside)


def test_other_differences(saved: Path) -> None:
    manifest = manifest_of(saved)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    os.truncate(saved / first, 1000)
    (saved / second).unlink()
    (saved / "more").write_text("")
    findings, others = compare(manifest, saved)
    assert others == ["more"]
    seen = {(each.id, each.file, each.tensor) for each in findings}
    assert ("file-missing", second, "w2") in seen
    assert ("file-size", first, "w1") in seen
    shutil.rmtree(saved)
    saved.mkdir()
    assert {each.id for each in compare(manifest, saved)[0]} == {"file-missing"}


def test_crc32c_that_was_kept_on_purpose(saved: Path) -> None:
    """Four bytes can give any content any CRC32C: SHA-256 finds that."""
    (saved / "note").write_bytes(b"abcdefgh")
    manifest = manifest_of(saved, with_sha256=True)
    wanted = crc32c(b"abcdefgh")
    base = crc32c(b"ABCD" + bytes(4))  # what each bit of the rest adds: CRC is linear
    columns = [crc32c(b"ABCD" + (1 << bit).to_bytes(4, "little")) ^ base for bit in range(32)]
    target, chosen = wanted ^ base, 0
    rows = [(column, 1 << bit) for bit, column in enumerate(columns)]
    for bit in range(32):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [
            (value ^ pivot[0], mask ^ pivot[1]) if value >> bit & 1 else (value, mask)
            for value, mask in rows
            if (value, mask) != pivot
        ]
        if target >> bit & 1:
            target, chosen = target ^ pivot[0], chosen ^ pivot[1]
    forged = b"ABCD" + chosen.to_bytes(4, "little")
    assert crc32c(forged) == wanted
    (saved / "note").write_bytes(forged)
    (found,) = compare(manifest, saved)[0]
    assert (found.id, found.file) == ("file-sha256", "note")


def test_sha256_lines_are_those_of_sha256sum(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    for name in ("plain", "with space", "new\nline", "back\\slash", "ümlaut"):
        (place / name).write_text(name)
    lines = sha256_lines(manifest_of(place, with_sha256=True).files)
    (tmp_path / "sums").write_bytes(os.fsencode(lines))
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "../sums"], cwd=place, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (place / "plain").write_text("other")
    done = subprocess.run(
        ["sha256sum", "-c", "../sums"], cwd=place, capture_output=True, check=False
    )
    assert done.returncode == 1


# --- sums ---------------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_sums(one: bytes, other: bytes) -> None:
    assert joined(crc32c(one), crc32c(other), len(other)) == crc32c(one + other)


def test_sums_of_ranges_that_cross_tasks(tmp_path: Path, rng: random.Random) -> None:
    """In a file of several tasks: overlapping, empty, to the end and beyond it."""
    size = 2 * TASK_BYTES + 12345
    data = rng.randbytes(1 << 20) * (size >> 20) + bytes(size & ((1 << 20) - 1))
    (tmp_path / "a").write_bytes(data)
    ends = [rng.randrange(size) for _ in range(60)]
    ranges = [(min(pair), max(pair)) for pair in zip(ends[::2], ends[1::2], strict=True)]
    ranges += [(0, size), (5, 5), (size - 1, size), (7, size + 1), (size + 5, size + 9)]
    found = file_sums(Place(tmp_path), {"a": ranges}, 3)["a"]
    assert (found.size_bytes, found.crc32c, found.problem) == (size, crc32c(data), None)
    for begin, end in ranges:
        wanted = crc32c(data[begin:end]) if end <= size and begin < end else None
        assert found.ranges.get((begin, end)) in ({wanted} if begin < end else {None, 0})


# --- signatures ---------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A private and a public key, and a pair of others."""
    pytest.importorskip("cryptography", reason="pip install 'cxlfs[sign]' has it")
    for name in ("own", "other"):
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.public"
        make = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(private)]
        subprocess.run(make, check=True, capture_output=True)
        write = ["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)]
        subprocess.run(write, check=True, capture_output=True)
    return tmp_path


def test_signatures(saved: Path, keys: Path) -> None:
    signed = manifest_of(saved, with_sha256=True).signed(keys / "own.pem")
    read = decode_manifest(signed.encode())
    assert read.is_signed_by(keys / "own.public")
    assert not read.is_signed_by(keys / "other.public")
    plain = json.loads(signed.encode())
    for change in ({"step": 8}, {"name": "step-8"}, {"made": "2020"}, {"signature": None}):
        assert not decode_manifest(json.dumps(plain | change).encode()).is_signed_by(
            keys / "own.public"
        )


def test_a_manifest_without_sha256_is_not_signed(saved: Path, keys: Path) -> None:
    with pytest.raises(ManifestError, match="SHA-256"):
        manifest_of(saved).signed(keys / "own.pem")


def test_keys_that_are_none(saved: Path, keys: Path) -> None:
    found = manifest_of(saved, with_sha256=True)
    (keys / "text").write_text("no key")
    with pytest.raises(UsageError, match="no private key"):
        found.signed(keys / "text")
    with pytest.raises(UsageError, match="no private key"):
        found.signed(keys / "own.public")
    with pytest.raises(UsageError, match="no public key"):
        found.signed(keys / "own.pem").is_signed_by(keys / "own.pem")
    make = ["openssl", "genpkey", "-algorithm", "x25519", "-out", str(keys / "x.pem")]
    subprocess.run(make, check=True, capture_output=True)
    with pytest.raises(UsageError, match="not a key of Ed25519"):
        found.signed(keys / "x.pem")


def test_without_cryptography(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(FrameworkMissingError, match="cryptography"):
        manifest_of(saved, with_sha256=True).signed(saved / "key")


# --- hostile ------------------------------------------------------------------------------------


def changed(plain: dict[str, Any], path: tuple[str | int, ...], value: object) -> bytes:
    """With another value somewhere, and its id made right again where that can be."""
    at: Any = plain
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "cxlfs.manifest/2"),
        (("files", 0, "name"), "../outside"),
        (("files", 0, "name"), "/etc/passwd"),
        (("files", 0, "name"), "a//b"),
        (("files", 0, "name"), "model-00002-of-00002.safetensors"),
        (("files", 0, "crc32c"), "xyz"),
        (("files", 0, "size_bytes"), -1),
        (("files", 0, "size_bytes"), 1 << 70),
        (("files", 0, "sha256"), "00"),
        (("tensors", 0, "parts", 0, "offset"), 1 << 62),
        (("tensors", 0, "parts", 0, "file"), "other"),
        (("tensors", 0, "shape"), [1] * 65),
        (("tensors", 0, "name"), "x" * 5000),
        (("step",), True),
        (("id",), "0" * 64),
        (("signature",), {"algorithm": "ed25519", "value": "AAAA"}),
        (("parents",), [{"name": "a", "step": None, "id": "1"}]),
        (("more",), 1),
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused(
    saved: Path, path: tuple[str | int, ...], value: object
) -> None:
    plain = json.loads(manifest_of(saved).encode())
    with pytest.raises(ManifestError):
        decode_manifest(changed(plain, path, value))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_kind_are_refused_or_read(data: st.DataObject) -> None:
    blob = data.draw(st.one_of(st.binary(max_size=200), st.text(max_size=50).map(str.encode)))
    with pytest.raises(ManifestError):
        decode_manifest(blob)


def test_what_could_not_be_read_is_not_made(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = manifest_of(saved)
    size = len(found.encode())
    monkeypatch.setattr("cxlfs.checkpoint.tensors.manifest.BYTES_MAX", size - 2)
    with pytest.raises(ManifestError, match=f"{size} bytes"):
        found.encode()
    with pytest.raises(ManifestError):
        decode_manifest(json.dumps(found.plain(), indent=1).encode())


def test_deep_and_large_json_is_refused() -> None:
    for blob in (b"[" * 100_000, b"[" + b"1," * 9_000_000 + b"1]", b'{"a":' * 50_000):
        with pytest.raises(ManifestError):
            decode_manifest(blob)
