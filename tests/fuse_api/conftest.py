"""Handlers called directly, without a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.direct_daemon import Daemon
from tests.support.fuse_api import Kernel, kernel_without_a_kernel


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with kernel_without_a_kernel(tmp_path) as made:
        yield made


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    media = MemoryMedia(64 << 20)
    Store.format(media)
    store = Store.open(media)
    made = Daemon(store)
    yield made
    for program in made.programs:
        program.die()
    made.requests.lookups.forget_all()
    store.close()
    assert not made.requests.failures.counts
    assert not list(run_passes(media, structure_only=False))
    media.close()
