"""Sizes, times and rates as people write and read them; nothing else formats numbers.

Sizes are binary (K = 1024 bytes), as in mkfs and zpool.
"""

from __future__ import annotations

import datetime as dt
import re

from cxlfs.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
NANOSECONDS = 1_000_000_000

_FACTORS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB, "P": 1 << 50}
_SIZE = re.compile(
    r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGTP]?)(?:i?B)?\s*", re.IGNORECASE | re.ASCII
)


def parse_size(text: str) -> int:
    """Bytes meant by ``4G``, ``512MiB``, ``1.5T`` or ``4096``; raises UsageError otherwise."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"not a size: {text!r}", next_step="write it like 512M or 4G")
    number, factor = match[1], _FACTORS[match[2].upper()]
    return int(float(number) * factor) if "." in number else int(number) * factor


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def parse_moment(text: str) -> int:
    """A commit number, or a time in ns, as ``1204`` or ``2026-11-26T08:00:00Z`` mean it; raises
    UsageError.
    """
    if text.isascii() and text.isdecimal() and len(text) <= len(str(1 << 64)):
        return int(text)
    try:
        moment = dt.datetime.fromisoformat(text).astimezone(dt.UTC)
        return (moment - _EPOCH) // dt.timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"neither a commit nor a time: {text!r}",
            next_step="give a number of cxlfs history, or a time like 2026-11-26T08:00:00Z",
        ) from error


_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*(ms|min|[smhd]?)\s*", re.IGNORECASE | re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds meant by ``1.5s``, ``20min``, ``2h07m``, ``54d`` or ``300``; raises UsageError."""
    seconds, at = 0.0, 0
    given = text.strip()
    while at < len(given):
        match = _DURATION.match(given, at)
        if match is None:
            break
        seconds += float(match[1]) * _SECONDS[match[2].lower()]
        at = match.end()
    if not given or at < len(given):
        raise UsageError(f"not a duration: {text!r}", next_step="write it like 1.5s, 20min or 54d")
    return seconds


def format_size(size_bytes: int) -> str:
    """``4.0 GiB`` and the like; whole bytes below 1 KiB."""
    if abs(size_bytes) < KIB:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= KIB
        if abs(value) < KIB or unit == "PiB":
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``4m05s`` or ``2h07m``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def format_rate(size_bytes: float, seconds: float) -> str:
    """``1.2 GiB/s``; a dash when no time has passed."""
    return f"{format_size(int(size_bytes / seconds))}/s" if seconds > 0 else "-"


def format_time_ns(time_ns: int) -> str:
    """RFC 3339 in UTC with milliseconds, ``2026-01-31T12:00:00.000Z``; a dash for 0."""
    if time_ns <= 0:
        return "-"
    seconds, nanoseconds = divmod(time_ns, NANOSECONDS)
    moment = dt.datetime.fromtimestamp(seconds, tz=dt.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanoseconds // 1_000_000:03d}Z"


def printable(text: str) -> str:
    """One line that any terminal and log can show: control characters and what is not UTF-8 are
    escaped as in C (hexadecimal); everything else stays.
    """
    return text if text.isprintable() else "".join(map(_printable_character, text))


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    if character in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[character]
    is_byte = "\udc80" <= character <= "\udcff"
    encoded = character.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in encoded)
