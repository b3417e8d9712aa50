"""Where the power is cut: points named in advance, and random times from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """When to cut. ``hold``: when the guest says that it has written half of the version named,
    and it waits there. ``rename``: as soon as it announces its ``count``-th rename. ``delay``: so
    many seconds after it has begun to save. ``recovery``: after that ``fraction`` of the time which
    the mount before took (the program's start is the larger part of it, recovery comes at the end).
    """

    kind: str
    version: str = ""
    count: int = 0
    seconds: float = 0.0
    fraction: float = 0.0

    def __str__(self) -> str:
        match self.kind:
            case "hold":
                return f"with half of {self.version.replace(' ', ' of step ')} written"
            case "rename":
                return f"at the start of rename {self.count}"
            case "delay":
                return f"{self.seconds:.2f} s after the first save began"
            case _:
                return f"after {self.fraction:.0%} of the time that a mount takes"


def cuts_of(generator: random.Random, count: int) -> list[Cut]:
    """``count`` cuts; the first two (the short form's) are one in mid-save and one at random."""
    cuts = [
        Cut("hold", version=f"latest.bin {generator.randint(2, 4)}"),
        Cut("delay", seconds=generator.uniform(0.1, 3.0)),
    ]
    while len(cuts) < count:
        cuts += [
            Cut("recovery", fraction=generator.uniform(0.6, 1.0)),
            Cut("rename", count=generator.randint(1, 6)),
            Cut("hold", version="checkpoint.tmp +1"),
            Cut("delay", seconds=generator.uniform(0.1, 8.0)),
            Cut("hold", version="shards.tmp/1.bin +2"),
            Cut("delay", seconds=generator.uniform(0.1, 2.0)),
        ]
    return cuts[:count]
