"""A program that saves for ever, and says before and after each save which.

    python -m tests.support.saver DIRECTORY SEED ROLE FIRST [LOG_NUMBER]

It is what gets killed, or loses its file system; ``kill_model`` reads what it said and compares. It
never imports cxlfs.

``ROLE`` is one of ``ROLES``: checkpoints, overwritten in different ways; or ``log``: a file that is
appended to, with fsync. ``FIRST`` is a version there, a size in bytes here.

Each line is ``begin N``, ``end N`` (close, rename or fsync returned) or ``error N ERRNO``; N is the
version, or the size of the log up to there. The contents come from seed, role and version alone:
whoever reads the files can make them again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20
SIZE_MAX = 8 * MIB
LARGE_BYTES = 24 * MIB
PERIOD_BYTES = 2 * MIB + 77_777
"""No multiple of anything that a store divides its room into."""
POINTER = "latest"
LOG = "log"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Checkpoints of one kind: ``slots`` files named after ``pattern``, each version in one of them
    (the first ones fill all of them in turn), of random sizes below ``size_max``.

    ``ways``: how a version is saved. ``has_pointer``: a small file is rewritten after each.
    """

    pattern: str
    ways: tuple[str, ...]
    size_min: int
    size_max: int
    slots: int = 1
    has_pointer: bool = False
    period_bytes: int = 2 * SIZE_MAX
    """Its contents come again after so many: what is random takes 5 ms for each MiB to make."""


ROLES = {
    # Half of them as torch.save does it.
    "mixed": Role(
        pattern="checkpoint.pt",
        ways=("truncate", "truncate", "ftruncate", "rename"),
        size_min=MIB // 4,
        size_max=SIZE_MAX,
        has_pointer=True,
    ),
    "truncate": Role(pattern="model.pt", ways=("truncate",), size_min=64 * KIB, size_max=4 * MIB),
    "rename": Role(
        pattern="model.safetensors", ways=("rename",), size_min=64 * KIB, size_max=4 * MIB
    ),
    # Some 80 MB of a store with 107: what is overwritten at random leaves its segments half dead.
    "shards": Role(
        pattern="shard-{:03}.pt",
        ways=("truncate", "rename"),
        size_min=64 * KIB,
        size_max=700 * KIB,
        slots=210,
    ),
    # Those of ``direct_saver``.
    "direct": Role(
        pattern="direct.pt",
        ways=("truncate", "rename"),
        size_min=MIB,
        size_max=LARGE_BYTES,
        period_bytes=PERIOD_BYTES,
    ),
    "direct-small": Role(
        pattern="direct-small.pt",
        ways=("truncate", "rename"),
        size_min=MIB,
        size_max=5 * MIB,
        period_bytes=PERIOD_BYTES,
    ),
    "direct-shards": Role(
        pattern="direct-{:02}.pt",
        ways=("truncate", "rename"),
        size_min=MIB,
        size_max=3 * MIB,
        slots=6,
        period_bytes=PERIOD_BYTES,
    ),
}


@functools.cache
def _pool(seed: int, period_bytes: int = 2 * SIZE_MAX) -> bytes:
    """What all versions are cut from: making each anew would take longer than saving it."""
    count = -(-(SIZE_MAX + LARGE_BYTES) // period_bytes) if period_bytes < 2 * SIZE_MAX else 1
    return random.Random(seed).randbytes(period_bytes) * count


def content(seed: int, role: str, version: int) -> bytes:
    """All bytes of a version, not a round number of them."""
    kind = ROLES[role]
    source = random.Random(f"{seed} {role} {version}")
    start = source.randrange(SIZE_MAX)
    size = source.randrange(kind.size_min, kind.size_max)
    return b"%020d" % version + _pool(seed, kind.period_bytes)[start : start + size]


def way(seed: int, role: str, version: int) -> str:
    return random.Random(f"way {seed} {role} {version}").choice(ROLES[role].ways)


def name(seed: int, role: str, version: int) -> str:
    """The file that ``version`` belongs into."""
    kind = ROLES[role]
    slot = version - 1
    if slot >= kind.slots:
        slot = random.Random(f"name {seed} {role} {version}").randrange(kind.slots)
    return kind.pattern.format(slot)


def pieces(data: bytes, seed: int) -> Iterator[memoryview]:
    """As writers cut it: headers of 64 bytes, tensors of a few KiB to MiB, a tail."""
    source = random.Random(f"pieces {seed} {len(data)}")
    view, position = memoryview(data), 0
    while position < len(data):
        size = source.choice([64, 4096, 65_537, MIB, 3 * MIB])
        yield view[position : position + size]
        position += size


def save(directory: Path, seed: int, role: str, version: int, data: bytes) -> None:
    """Raises OSError."""
    how = way(seed, role, version)
    final = directory / name(seed, role, version)
    target = final.with_name(f"{final.name}.tmp") if how == "rename" else final
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if how != "ftruncate" else 0)
    descriptor = os.open(target, flags, 0o644)
    if how == "ftruncate":
        os.ftruncate(descriptor, 0)
    for piece in pieces(data, seed):
        _write(descriptor, piece)
    os.close(descriptor)
    if how == "rename":
        target.rename(final)
    if ROLES[role].has_pointer:
        (directory / POINTER).write_text(f"{version}\n")  # as trackers do: opened with "w"


def _write(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):  # a short write is followed by an error, or by the rest
        done += os.write(descriptor, data[done:])


# --- the log ------------------------------------------------------------------------------------


def log_name(number: int) -> str:
    """The harness begins a new log now and then."""
    return f"train-{number}.log"


def log_content(seed: int, number: int, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a log: each has another one, and none comes twice in SIZE_MAX bytes."""
    shift = random.Random(f"{seed} log {number}").randrange(SIZE_MAX)
    data = _pool(seed)[shift + begin : shift + end]
    assert len(data) == end - begin, "the log has grown too long"
    return data


def append(directory: Path, seed: int, number: int, size_bytes: int) -> None:
    """Append lines and tables up to SIZE_MAX; one fsync for one to three of them.

    A log that is full goes on with fsync: only a failure ends this, never its own size.
    """
    source = random.Random(f"{seed} log {number} {size_bytes}")
    descriptor = -1
    while True:
        parts = [source.choice([40, 90, 200, 3000, 20_000]) for _ in range(source.randint(1, 3))]
        if size_bytes + sum(parts) > SIZE_MAX:
            parts = []
        end = size_bytes + sum(parts)
        if parts:
            say(f"begin {end}")
        try:
            if descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                descriptor = os.open(directory / log_name(number), flags, 0o644)
            for part in parts:
                data = log_content(seed, number, size_bytes, size_bytes + part)
                _write(descriptor, memoryview(data))
                size_bytes += part
            os.fsync(descriptor)
        except OSError as error:
            say(f"error {end} {error.errno}")
            sys.exit(1)
        say(f"end {end}")


def say(line: str) -> None:
    """With one system call: a kill cuts no line."""
    os.write(1, line.encode() + b"\n")


def main() -> None:
    directory, seed, role, first = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
    )
    if role == LOG:
        append(directory, seed, int(sys.argv[5]), first)
        return
    version = first
    while True:
        data = content(seed, role, version)
        say(f"begin {version}")
        try:
            save(directory, seed, role, version, data)
        except OSError as error:
            say(f"error {version} {error.errno}")
            sys.exit(1)
        say(f"end {version}")
        version += 1


if __name__ == "__main__":
    main()
