from __future__ import annotations

from collections.abc import Iterator

import pytest

from cxlfs.native import FaultKind, set_fault


@pytest.fixture(autouse=True)
def _switches_off() -> Iterator[None]:
    """A fault switch that a test leaves set would fail the next one."""
    yield
    for kind in FaultKind:
        set_fault(kind, 0)
