"""Kernels whose requests carry little: fs.fuse.max_pages_limit below 32."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.control.client import control_request
from tests.support.mount import MIB, Workplace, wait_until

SERVE = """
import sys
from cxlfs.daemon import server
from cxlfs.daemon.mount import make_config, mount_foreground
from cxlfs.fuse.request_sizes import RequestSizes
server.request_sizes = lambda: RequestSizes(int(sys.argv[3]), int(sys.argv[3]))
mount_foreground(make_config(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.parametrize("pages", [1, 16, 31])
def test_small_requests_are_enough(unmounted: Workplace, rng: random.Random, pages: int) -> None:
    size = pages * os.sysconf("SC_PAGE_SIZE")
    mountpoint = unmounted.mountpoint
    daemon = unmounted.python(SERVE, unmounted.source, mountpoint, size)
    wait_until(lambda: unmounted.is_mounted and mountpoint.is_dir(), "it is mounted")
    data = rng.randbytes(MIB + 17)
    (mountpoint / "file").write_bytes(data)
    assert (mountpoint / "file").read_bytes() == data
    os.setxattr(mountpoint / "file", "user.large", data[:60_000])
    assert os.getxattr(mountpoint / "file", "user.large") == data[:60_000]
    for number in range(500):
        (mountpoint / f"{number:0200}").touch()
    assert len(list(mountpoint.iterdir())) == 501
    (message,) = control_request(str(mountpoint), "status")
    transport = message["transport"]
    assert isinstance(transport, dict)
    assert transport["reads"] >= len(data) // size
    unmounted.unmount()
    assert daemon.wait(20) == 0
