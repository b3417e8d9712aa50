"""Sizes, durations and times as text; error classes and their identities."""

from __future__ import annotations

import errno
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlfs import errors, units
from cxlfs.errors import CxlfsError, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1K", 1024),
        ("4g", 4 << 30),
        ("512MiB", 512 << 20),
        ("512 MB", 512 << 20),
        ("1.5T", 3 << 39),
        (" 2P ", 2 << 50),
        ("7B", 7),
        ("0.5K", 512),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert units.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "K", "-1", "1e9", "4X", "1..5", "½", "٣", "1 2", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300", 300.0),
        ("850ms", 0.85),
        (" 1.5 s ", 1.5),
        ("20min", 1200.0),
        ("20m", 1200.0),
        ("2h07m", 7620.0),
        ("3.9H", 14040.0),
        ("1d 2h", 93600.0),
    ],
)
def test_durations_read(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", " ", "s", "-1", "1e9", "4x", "1..5", "½", "٣", "inf", "nan"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError):
        units.parse_duration(text)


@given(st.integers(0, 1 << 60))
def test_whole_bytes_round_trip(size: int) -> None:
    assert units.parse_size(str(size)) == size


@given(st.integers(0, 1 << 62))
def test_formatted_sizes_are_close(size: int) -> None:
    text = units.format_size(size)
    if size < 1 << 60:
        assert abs(units.parse_size(text.replace(" ", "")) - size) <= max(size * 0.06, 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (4 << 30, "4.0 GiB"),
        (-2048, "-2.0 KiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_format_size(value: int, text: str) -> None:
    assert units.format_size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.85, "850 ms"), (12.34, "12.3 s"), (245.0, "4m05s"), (7620.0, "2h07m"), (60.0, "1m00s")],
)
def test_durations(value: float, text: str) -> None:
    assert units.format_duration(value) == text


def test_rates_and_times() -> None:
    assert units.format_rate(1 << 30, 1.0) == "1.0 GiB/s"
    assert units.format_rate(1, 0) == "-"
    assert units.format_time_ns(0) == "-"
    assert units.format_time_ns(1_767_225_600_123_456_789) == "2026-01-01T00:00:00.123Z"


def classes() -> list[type[CxlfsError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return [each for _, each in members if issubclass(each, CxlfsError)]


def test_ids_are_unique_and_plain() -> None:
    ids = [each.id for each in classes()]
    assert len(ids) == len(set(ids))
    assert all(text == text.lower() and " " not in text for text in ids)


def test_every_class_says_what_it_is() -> None:
    for each in classes():
        assert each.errno in errno.errorcode, each
        assert each.default_next_step, each
        assert 1 <= each.exit_code <= 125, each
        assert each.id == vars(each)["id"], f"{each} has no id of its own"


def test_invariant() -> None:
    errors.invariant(1, "fine")
    with pytest.raises(errors.InvariantError, match="broken"):
        errors.invariant([], "broken")
    assert not issubclass(errors.InvariantError, CxlfsError)
