from __future__ import annotations

import io
import random
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cxlfs.media.signatures import TABLE, Signature, find
from cxlfs.units import KIB, MIB

REGION_BYTES = 80 * MIB


def region_with(signature: Signature, place: int, size_bytes: int = REGION_BYTES) -> np.ndarray:
    """Zeros with one signature written at one of its places, as its format defines them."""
    region = np.zeros(size_bytes, dtype=np.uint8)
    end = size_bytes - size_bytes % signature.round_end_to
    offset = place if place >= 0 else end + place
    for also, values in signature.also:
        put(region, also, values[0])
    put(region, offset, signature.magic)
    return region


def put(region: np.ndarray, offset: int, data: bytes) -> None:
    region[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)


def names_in(region: np.ndarray | bytes) -> list[str]:
    data = np.frombuffer(region, dtype=np.uint8) if isinstance(region, bytes) else region

    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(data)
        return data[offset : offset + length].tobytes()

    return list(dict.fromkeys(item.name for item in find(read, len(data))))


@pytest.mark.parametrize(
    ("signature", "place"),
    [(signature, place) for signature in TABLE for place in signature.offsets[:9]],
    ids=lambda value: value.name if isinstance(value, Signature) else str(value),
)
def test_every_signature_is_found_at_each_place(signature: Signature, place: int) -> None:
    size_bytes = REGION_BYTES - 12345  # the end is no round number
    assert signature.name in names_in(region_with(signature, place, size_bytes))


@pytest.mark.parametrize("signature", TABLE, ids=lambda signature: signature.name)
def test_every_byte_of_a_magic_counts(signature: Signature) -> None:
    for position in range(len(signature.magic)):
        region = region_with(signature, signature.offsets[0], 8 * MIB)
        end = len(region) - len(region) % signature.round_end_to
        place = signature.offsets[0]
        region[(place if place >= 0 else end + place) + position] ^= 0x80
        assert signature.name not in names_in(region)


def test_places_are_inside_a_small_region() -> None:
    for size_bytes in (0, 1, 511, 512, 4095, 65537):
        assert names_in(bytes(size_bytes)) == []


def test_found_says_where_and_how_long() -> None:
    region = region_with(next(s for s in TABLE if s.name == "LUKS"), 0, MIB)
    put(region, 0x438, b"\x53\xef")
    found = find(lambda offset, length: region[offset : offset + length].tobytes(), len(region))
    places = {(item.name, item.offset, item.length) for item in found}
    assert places == {("LUKS", 0, 6), ("ext2, ext3 or ext4", 0x438, 2)}


def test_zeros_and_noise_are_empty() -> None:
    assert names_in(bytes(4 * MIB)) == []
    assert names_in(random.Random(7).randbytes(4 * MIB)) == []


def test_names_and_sources_are_written_down() -> None:
    assert all(signature.name and signature.source for signature in TABLE)
    assert all(signature.magic and signature.offsets for signature in TABLE)


# --- what real programs write -------------------------------------------------------------------

MAKERS = {
    "ext2, ext3 or ext4": ["mkfs.ext4", "-q", "-F"],
    "XFS": ["mkfs.xfs", "-q", "-f"],
    "swap space": ["mkswap"],
    "Minix file system": ["mkfs.minix", "-1"],
    "BFS": ["mkfs.bfs"],
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_its_own_program_makes_is_found(name: str, tmp_path: Path) -> None:
    command = MAKERS[name]
    program = shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    image = tmp_path / "image"
    size_bytes = 512 * MIB if name == "XFS" else 64 * MIB
    with image.open("wb") as file:
        file.truncate(size_bytes)
    done = subprocess.run(
        [program, *command[1:], str(image)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"{command[0]} does not work on a file here: {done.stderr.strip()}")
    with image.open("rb") as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        assert name in [item.name for item in find(read, size_bytes)]


def test_archives_and_arrays_are_found() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    assert names_in(packed.getvalue()) == ["zip archive (torch.save writes these)"]

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("name"))
    assert names_in(packed.getvalue()) == ["tar archive"]

    packed = io.BytesIO()
    np.save(packed, np.arange(16 * KIB))
    assert names_in(packed.getvalue()) == ["numpy array"]


def test_a_safetensors_file_is_found() -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert names_in(len(header).to_bytes(8, "little") + header + bytes(8)) == ["safetensors file"]
