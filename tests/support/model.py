"""A plain model of what a store promises: names, contents, and what a crash takes back."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class ModelFile:
    """``live``: what readers see. ``committed``: None while the file is not committed."""

    live: bytearray = dataclasses.field(default_factory=bytearray)
    committed: bytes | None = None
    incomplete: bool = False
    names: int = 1

    def publish(self) -> None:
        self.committed = bytes(self.live)
        self.incomplete = False


@dataclasses.dataclass
class ModelHandle:
    """One open writer; ``truncated``: it began an overwrite that a kill takes back."""

    file: ModelFile
    truncated: bool


def write(file: ModelFile, offset: int, data: bytes) -> None:
    write_bytes(file.live, offset, data)


def truncate(file: ModelFile, size: int) -> None:
    truncate_bytes(file.live, size)


def write_bytes(content: bytearray, offset: int, data: bytes) -> None:
    """As write(2): zeros between the old end and ``offset``."""
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def truncate_bytes(content: bytearray, size: int) -> None:
    """As truncate(2)."""
    content.extend(bytes(max(0, size - len(content))))
    del content[size:]
