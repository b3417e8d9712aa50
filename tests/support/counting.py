"""Work as a number that is the same on every machine: calls of functions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(verb: Callable[[], object]) -> int:
    """Of Python functions, and of C functions from Python; none that end what others left."""
    calls = 0
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        verb()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return calls
