"""Every routine that this CPU has, forced through the environment, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import variants


def cpu_flags() -> set[str]:
    """What the kernel says the CPU has: an opinion independent of the dispatch in C."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


NEEDS = {
    "clwb": {"clwb"},
    "clflushopt": {"clflushopt"},
    "clflush": {"clflush"},
    "none": set(),
    "dc-cvap": {"dcpop"},
    "dc-cvadp": {"dcpodp"},
    "crc32c-vpclmul": {"vpclmulqdq", "avx512f", "sse4_2"},
    "crc32c-vpclmul256": {"vpclmulqdq", "avx2", "sse4_2", "pclmulqdq"},
    "crc32c-sse42": {"sse4_2", "pclmulqdq"},
    "crc32c-arm": {"crc32", "asimd"},
    "crc32c-table": set(),
    "nt-avx512": {"avx512f"},
    "nt-avx2": {"avx2"},
    "nt-sse2": {"sse2"},
    "stores": set(),
}


def expect(status: int, name: str) -> None:
    """A routine the CPU has passes its check; one it lacks is refused, never replaced."""
    assert status == (0 if cpu_flags() >= NEEDS[name] else variants.LACKING)


@pytest.mark.parametrize("name", variants.CRC32C)
def test_checksum_of_each_routine_equals_the_definition(name: str) -> None:
    expect(variants.run("crc32c", CXLFS_CRC32C=name), name)


@pytest.mark.parametrize("name", variants.COPY)
def test_each_copy_routine_changes_its_range_and_nothing_else(name: str) -> None:
    expect(variants.run("copy", CXLFS_COPY=name), name)


@pytest.mark.parametrize("name", variants.CRC32C)
def test_copy_with_each_checksum_routine(name: str) -> None:
    expect(variants.run("copy", CXLFS_CRC32C=name), name)


@pytest.mark.parametrize("name", variants.CRC32C)
def test_the_checksum_is_of_what_was_stored(name: str) -> None:
    expect(variants.run("changing-source", CXLFS_CRC32C=name), name)


@pytest.mark.parametrize("name", variants.COPY)
def test_the_checksum_is_of_what_each_copy_routine_stored(name: str) -> None:
    expect(variants.run("changing-source", CXLFS_COPY=name), name)


@pytest.mark.parametrize("name", variants.WRITE_BACK)
def test_each_write_back_routine_can_be_chosen(name: str) -> None:
    expect(variants.run("names", CXLFS_WRITE_BACK=name), name)


@pytest.mark.parametrize("name", [name for name in variants.WRITE_BACK if name != "none"])
def test_write_back_is_given_the_address_of_the_range(name: str) -> None:
    expect(variants.run("write-back-address", CXLFS_WRITE_BACK=name), name)


@pytest.mark.parametrize("variable", ["CXLFS_WRITE_BACK", "CXLFS_CRC32C", "CXLFS_COPY"])
def test_unknown_routine_is_refused(variable: str) -> None:
    assert variants.run("names", **{variable: "no-such-routine"}) == variants.LACKING


@pytest.mark.parametrize("variable", ["CXLFS_WRITE_BACK", "CXLFS_CRC32C", "CXLFS_COPY"])
def test_empty_override_counts_as_unset(variable: str) -> None:
    assert variants.run("names", **{variable: ""}) == 0


def test_oracles_agree_with_the_published_check_values() -> None:
    """RFC 3720, appendix B.4, and the check value of the CRC catalogue."""
    vectors = {
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
    }
    oracle = variants.Oracle()
    for data, crc in vectors.items():
        assert variants.oracle_crc32c(data) == oracle.crc32c(data) == crc
