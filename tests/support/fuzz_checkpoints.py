"""Hostile checkpoints: those of real libraries, changed at random, mostly with their checksums made
right again so that deep code is reached; and headers made of random parts.

A seed and an index always give the same one.

Never here: trying them (``hostile_checkpoints``).
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cxlfs.checkpoint.content import masked
from cxlfs.checkpoint.pickles import _ACTIONS
from cxlfs.native import crc32c
from tests.support.checkpoints import CASES, Case, files_of, unpack_into

Rng = random.Random
Files = dict[str, bytes]
"""Name, relative to the directory that the checkpoint lies in, and content."""

INTERESTING = (0, 1, 2, 7, 8, 63, 127, 128, 255, 256, 4095, 65535, 1 << 20, (1 << 31) - 1, 1 << 31)
INTERESTING += ((1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


@dataclasses.dataclass(frozen=True)
class Base:
    """A good checkpoint. ``path`` is relative to the directory that ``files`` lie in."""

    path: str
    files: Files

    def __str__(self) -> str:
        return self.path


@functools.cache
def bases() -> tuple[Base, ...]:
    """One of each format, the small ones several times: they are tried faster."""
    found = [_numpy()]
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            place = Path(directory) / case.archive
            if not place.is_dir():
                place.mkdir()
                unpack_into(case.archive, place)
            found.append(_base(case, place))
    light = [base for base in found if sum(map(len, base.files.values())) < 8 << 10]
    return (*found, *light, *light, *light)


def _base(case: Case, place: Path) -> Base:
    path = place / case.path
    files = {str(p.relative_to(path.parent)): p.read_bytes() for p in files_of(path)}
    return Base(path.name, files)


def _numpy() -> Base:
    target = io.BytesIO()
    np.savez(target, a=np.arange(12.0).reshape(3, 4), b=np.zeros(3, "<i2"))
    return Base("arrays-5.npz", {"arrays-5.npz": target.getvalue()})


# --- changes to bytes -----------------------------------------------------------------------


def flip(rng: Rng, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def put_number(rng: Rng, data: bytearray) -> None:
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice(INTERESTING) if rng.random() < 0.8 else rng.getrandbits(64)
    value &= (1 << 8 * width) - 1
    at = rng.randrange(len(data))
    data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))


def cut(rng: Rng, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def remove(rng: Rng, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 2, 4, 16, 100))]


def repeat(rng: Rng, data: bytearray) -> None:
    at = rng.randrange(len(data))
    piece = bytes(data[at : at + rng.choice((1, 4, 16, 64, 512))])
    data[at:at] = piece * rng.choice((1, 2, 50))


def blank(rng: Rng, data: bytearray) -> None:
    at = rng.randrange(len(data))
    length = min(rng.choice((4, 64, 512)), len(data) - at)
    data[at : at + length] = bytes([rng.choice((0, 0, 0xFF, 0x28, 0x5B))]) * length


def change_digits(rng: Rng, data: bytearray) -> None:
    """Numbers in JSON and the like."""
    places = [at for at, byte in enumerate(data[:65536]) if 48 <= byte <= 57]
    if places:
        at = rng.choice(places)
        data[at : at + 1] = str(rng.choice(INTERESTING)).encode()


def put_opcode(rng: Rng, data: bytearray) -> None:
    """An opcode that the interpreter knows, with or without something to chew on."""
    known = [code for code, action in enumerate(_ACTIONS) if action is not None]
    at = rng.randrange(len(data) + 1)
    piece = bytes([rng.choice(known)]) + rng.randbytes(rng.choice((0, 0, 1, 4)))
    if rng.random() < 0.5:
        data[at:at] = piece * rng.choice((1, 1, 20))
    else:
        data[at : at + len(piece)] = piece


CHANGES: tuple[Callable[[Rng, bytearray], None], ...] = (
    flip,
    flip,
    put_number,
    put_number,
    put_number,
    cut,
    remove,
    repeat,
    blank,
    change_digits,
    put_opcode,
)


def changed(rng: Rng, data: bytes) -> tuple[bytes, str]:
    """``data`` with one to four changes, and what they were."""
    result = bytearray(data)
    notes = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not result:
            break
        change = rng.choice(CHANGES)
        change(rng, result)
        notes.append(change.__name__)
    return bytes(result), " ".join(notes)


# --- with checksums made right --------------------------------------------------------------


def change_zip(rng: Rng, data: bytes) -> tuple[bytes, str]:
    """One record changed, and the archive written anew around it."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        records = [(info.filename, source.read(info)) for info in source.infolist()]
    weights = [5 if name.endswith(("data.pkl", ".json", ".npy")) else 1 for name, _ in records]
    chosen = rng.choices(range(len(records)), weights)[0]
    name, content = records[chosen]
    content, notes = changed(rng, content) if content else (content, "nothing")
    records[chosen] = (name, content)
    if rng.random() < 0.1:
        records.pop(rng.randrange(len(records)))
        notes += " and one record left out"
    target = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.2 else zipfile.ZIP_STORED
    with zipfile.ZipFile(target, "w", method) as archive:
        for each, inside in records:
            archive.writestr(zipfile.ZipInfo(each), inside, method)
    return target.getvalue(), f"record {name}: {notes}"


def change_table(rng: Rng, data: bytes) -> tuple[bytes, str]:
    """A block of TensorFlow's index, and its checksum. The index of blocks follows two of them."""
    result = bytearray(data)
    footer = data[-48:]
    numbers, at = [], 0
    for _ in range(4):
        value = shift = 0
        while True:
            value |= (footer[at] & 0x7F) << shift
            shift += 7
            at += 1
            if footer[at - 1] < 0x80:
                break
        numbers.append(value)
    meta, index = (numbers[0], numbers[1]), (numbers[2], numbers[3])
    offset, size = rng.choice(((0, meta[0] - 5), (0, meta[0] - 5), index))
    block = bytearray(result[offset : offset + size])
    notes = []
    for _ in range(rng.choice((1, 1, 3))):
        change = rng.choice((flip, put_number, blank))
        change(rng, block)
        notes.append(change.__name__)
    block = block[:size].ljust(size, b"\0")
    result[offset : offset + size] = block
    sealed = masked(crc32c(bytes(result[offset : offset + size + 1])))
    result[offset + size + 1 : offset + size + 5] = struct.pack("<L", sealed)
    return bytes(result), f"block at {offset}: {' '.join(notes)}"


# --- headers of random parts ----------------------------------------------------------------


def random_pickle(rng: Rng, depth: int = 400) -> bytes:
    known = [code for code, action in enumerate(_ACTIONS) if action is not None]
    parts = [b"\x80\x04"]
    for _ in range(rng.randrange(depth)):
        code = bytes([rng.choice(known)])
        if code in b"XTB":
            parts.append(code + struct.pack("<L", 3) + b"abc")
        elif code in b"cigpPISVLF":
            parts.append(code + rng.choice((b"torch\nSize\n", b"1\n", b"'x'\n")))
        else:
            parts.append(code + rng.randbytes(rng.choice((0, 0, 0, 1, 2))))
    return b"".join(parts) + b"."


def random_json(rng: Rng) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return b"[" * rng.choice((10, 1000, 100_000)) + b"]" * rng.choice((0, 10))
    if kind == 1:
        return b'{"a":' * rng.choice((10, 5000)) + b"1" + b"}" * 10
    if kind == 2:
        tensors = {
            f"t{n}": {
                "dtype": rng.choice(("F32", "U8", "??", "F4")),
                "shape": [rng.choice(INTERESTING) for _ in range(rng.choice((0, 1, 3, 70)))],
                "data_offsets": [rng.choice(INTERESTING), rng.choice(INTERESTING)],
            }
            for n in range(rng.randrange(6))
        }
        return json.dumps(tensors).encode()
    return b'{"x": ' + b"9" * rng.choice((10, 5000)) + b"}"


def random_header(rng: Rng) -> tuple[Base, str]:
    """A file or directory around a header that nobody wrote."""
    kind = rng.randrange(6)
    pickle = random_pickle(rng)
    if kind == 0:
        return Base("step-3", {"step-3/.metadata": pickle, "step-3/__0_0.distcp": b"x"}), "pickle"
    if kind == 1:
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr(zipfile.ZipInfo("a/data.pkl"), pickle)
            archive.writestr(zipfile.ZipInfo("a/data/0"), bytes(64))
        return Base("m.pt", {"m.pt": target.getvalue()}), "pickle in an archive"
    if kind == 2:
        header = random_json(rng)
        data = len(header).to_bytes(8, "little") + header + bytes(rng.choice((0, 64)))
        return Base("m.safetensors", {"m.safetensors": data}), "header of safetensors"
    if kind == 3:
        name = rng.choice(("trainer_state.json", "model.safetensors.index.json", "metadata.json"))
        return Base("checkpoint-7", {f"checkpoint-7/{name}": random_json(rng)}), name
    if kind == 4:
        descr = rng.choice(("'<f4'", "'|O'", "[('a', '<i2')]", "'<V9999999'", "(" * 300))
        shape = rng.choice(("(3,)", "()", "(99999999999, 99999999999)", "-" * 5000 + "1"))
        text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
        data = b"\x93NUMPY\x01\x00" + (len(text) & 0xFFFF).to_bytes(2, "little") + text
        return Base("a.npy", {"a.npy": data + bytes(12)}), "header of NumPy"
    data = bytes(rng.choice((0xDF, 0xDD, 0x8F, 0x81, 0xA1, 0xC7, 1, 0xFF)) for _ in range(200))
    return Base("checkpoint_3", {"checkpoint_3": data + rng.randbytes(20)}), "items of msgpack"


def make(seed: int, index: int) -> tuple[Base, list[str]]:
    """The hostile checkpoint of an index, and what was done to it."""
    rng = random.Random(f"{seed} {index}")
    if rng.random() < 0.12:
        base, note = random_header(rng)
        return base, [note]
    base = rng.choice(bases())
    files = dict(base.files)
    notes = [str(base)]
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(files))
        data = files[name]
        if data.startswith(b"PK\x03\x04") and rng.random() < 0.6 and zipfile_opens(data):
            files[name], note = change_zip(rng, data)
        elif name.endswith(".index") and rng.random() < 0.6 and data == base.files[name]:
            files[name], note = change_table(rng, data)
        else:
            files[name], note = changed(rng, data)
        notes.append(f"{name}: {note}")
    if len(files) > 1 and rng.random() < 0.1:
        first, second = rng.sample(sorted(files), 2)
        files[first] = files[second]
        notes.append(f"{first} is a copy of {second}")
    return Base(base.path, files), notes


def zipfile_opens(data: bytes) -> bool:
    """And each record can be read, also where two have one name: ``testzip`` reads by names."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
            for record in records:
                archive.read(record)
            return bool(records)
    except Exception:  # noqa: BLE001  zipfile has many ways to refuse what was changed
        return False
