"""Handlers called directly, without a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fuse_api import Kernel, kernel_without_a_kernel


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with kernel_without_a_kernel(tmp_path) as made:
        yield made
