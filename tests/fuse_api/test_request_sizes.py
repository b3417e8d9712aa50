"""How large the kernel's requests may be, on machines with other pages, limits and pipes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cxlfs.fuse import request_sizes as sizes_module
from cxlfs.fuse.request_sizes import RequestSizes, answer_bytes_max, pipe_bytes_max, request_sizes

KIB, MIB = 1 << 10, 1 << 20
FEW = "max_pages_limit"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Of another size; the machine has any pipe."""
    monkeypatch.setattr(sizes_module, "pipe_bytes_max", lambda wanted: wanted)

    def set_page_size(size_bytes: int) -> None:
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": size_bytes}.__getitem__)

    set_page_size(4 * KIB)
    return set_page_size


def machine(root: Path, limit: str | None) -> Path:
    if limit is not None:
        (root / "sys" / "fs" / "fuse").mkdir(parents=True)
        (root / "sys" / "fs" / "fuse" / "max_pages_limit").write_text(limit)
    return root


@pytest.mark.parametrize(
    ("page_bytes", "limit", "request_bytes"),
    [
        (4 * KIB, None, MIB),
        (4 * KIB, "256\n", MIB),
        (4 * KIB, "1024\n", 4 * MIB),
        (4 * KIB, "65535\n", 4 * MIB),
        (4 * KIB, "31\n", 31 * 4 * KIB),
        (4 * KIB, "1\n", 4 * KIB),
        (4 * KIB, "nonsense", MIB),
        (64 * KIB, None, 4 * MIB),
        (64 * KIB, "16\n", MIB),
        (64 * KIB, "1\n", 64 * KIB),
    ],
)
def test_requests_are_as_large_as_the_kernel_permits(
    tmp_path: Path,
    pages: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    page_bytes: int,
    limit: str | None,
    request_bytes: int,
) -> None:
    pages(page_bytes)
    found = request_sizes(machine(tmp_path, limit))
    assert found == RequestSizes(request_bytes, request_bytes)
    said = [record.getMessage() for record in caplog.records]
    assert bool(said) == (request_bytes < 128 * KIB)
    assert all("sysctl fs.fuse.max_pages_limit=256" in text for text in said)


@pytest.mark.parametrize(
    ("page_bytes", "request_bytes", "pipe_bytes", "answer_bytes"),
    [
        (4 * KIB, MIB, 2 * MIB, MIB),
        (4 * KIB, MIB, MIB, 512 * KIB),  # an ordinary user, a container
        (4 * KIB, 4 * MIB, MIB, 512 * KIB),
        (4 * KIB, MIB, 128 * KIB, 64 * KIB),
        (4 * KIB, MIB, 64 * KIB, MIB),  # too small for any: all are written
        (4 * KIB, MIB, 8 * KIB, MIB),
        (4 * KIB, MIB, 0, MIB),
        (4 * KIB, 255 * 4 * KIB, MIB, 127 * 4 * KIB),
        (64 * KIB, MIB, MIB, 512 * KIB),
        (64 * KIB, 64 * KIB, MIB, 64 * KIB),
    ],
)
def test_answers_fit_the_pipe(
    pages: Callable[[int], None],
    page_bytes: int,
    request_bytes: int,
    pipe_bytes: int,
    answer_bytes: int,
) -> None:
    pages(page_bytes)
    assert answer_bytes_max(request_bytes, pipe_bytes) == answer_bytes


def test_this_machine_gives_a_pipe() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    allowed = int(Path("/proc/sys/fs/pipe-max-size").read_text("ascii"))
    assert pipe_bytes_max(64 * KIB) == 64 * KIB
    assert pipe_bytes_max(4 * allowed) >= allowed
    assert len(list(Path("/proc/self/fd").iterdir())) == before
