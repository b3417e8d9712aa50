"""A job of one process: nobody to talk to."""

from __future__ import annotations

import secrets

from cxlfs.job.engines.interface import World


class LocalEngine:
    def __init__(self) -> None:
        self._world = World(0, 1, secrets.token_hex(8))

    def world(self) -> World:
        return self._world

    def gather(self, key: str, body: bytes, seconds: float) -> dict[int, bytes]:
        del key, seconds
        return {0: body}

    def broadcast(self, key: str, body: bytes | None, seconds: float) -> bytes | None:
        del key, seconds
        return body

    def forget(self, key: str) -> None:
        del key
