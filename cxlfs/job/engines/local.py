"""A job of one process: nobody to talk to."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from cxlfs.errors import JobLinkError
from cxlfs.job.engines.interface import Link, World


class LocalEngine:
    def __init__(self) -> None:
        self._world = World(0, 1, secrets.token_hex(8))
        self._said: dict[str, bytes] = {}

    def world(self) -> World:
        return self._world

    def say(
        self, key: str, body: bytes, *, to: Sequence[int] | None = None, near: bool = False
    ) -> None:
        del to, near
        self._said[key] = body

    def hear(
        self, key: str, ranks: Sequence[int], seconds: float, *, near: bool = False
    ) -> dict[int, bytes]:
        del seconds, near
        return {rank: self._said[key] for rank in ranks if key in self._said}

    def link(self, other: int, name: str, seconds: float) -> Link:
        del name, seconds
        raise JobLinkError(f"the engine of one process reaches no rank {other}")

    def forget(self, key: str) -> None:
        self._said.pop(key, None)
