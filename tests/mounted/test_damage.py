"""Damaged data behind a mount: an error for the damaged range, and never wrong bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cxlfs.control.client import control_request
from tests.support.mount import MIB, Workplace

CHUNK_BYTES = 64 << 10


def flip(source: Path, pattern: bytes) -> None:
    """Flip one bit of the only place on the media that holds ``pattern``."""
    content = source.read_bytes()
    place = content.index(pattern)
    assert content.count(pattern) == 1
    with source.open("r+b") as file:
        file.seek(place + 5)
        file.write(bytes([content[place + 5] ^ 1]))


@pytest.mark.parametrize("option", ["verify=read", "verify=off"])
def test_a_flipped_bit_is_never_read_as_data(place: Workplace, option: str) -> None:
    place.announced.append("checksum|damage")
    path = place.mountpoint / "checkpoint"
    data = os.urandom(2 * MIB)
    path.write_bytes(data)
    (place.mountpoint / "other").write_bytes(data[::-1])
    offset = MIB + 70_000
    pattern = data[offset : offset + 32]
    place.unmount()
    flip(place.source, pattern)
    place.mount(option)
    descriptor = os.open(path, os.O_RDONLY)
    if option == "verify=off":
        place.damaged_history = True  # nobody has noticed, so history keeps the version
        assert os.pread(descriptor, 32, offset) != pattern
    else:
        with pytest.raises(OSError) as caught:
            os.pread(descriptor, 32, offset)
        assert caught.value.errno == errno.EIO
        assert "/checkpoint" in place.log_text()
        (status,) = control_request(str(place.mountpoint), "status")
        assert status["state"] == "NEEDS-CHECK"
        assert os.getxattr(path, "user.cxlfs.state") == b"damaged"
    start = offset // CHUNK_BYTES * CHUNK_BYTES
    assert os.pread(descriptor, 4096, start - 4096) == data[start - 4096 : start]
    after = start + CHUNK_BYTES
    assert os.pread(descriptor, 4096, after) == data[after : after + 4096]
    os.close(descriptor)
    assert (place.mountpoint / "other").read_bytes() == data[::-1]
    path.write_bytes(data)  # saving again heals it
    assert path.read_bytes() == data
