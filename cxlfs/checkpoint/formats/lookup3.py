"""The checksum of HDF5's metadata: Bob Jenkins' lookup3, ``hashlittle`` with an initial value of 0.

Source: http://burtleburtle.net/bob/c/lookup3.c (public domain); HDF5 specification 3.0, appendix.
"""

from __future__ import annotations

_MASK = 0xFFFF_FFFF


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def lookup3(data: bytes) -> int:
    """32 bits over ``data``; some microseconds for each 12 bytes, so for headers only."""
    a = b = c = (0xDEAD_BEEF + len(data)) & _MASK
    at = 0
    while len(data) - at > 12:
        a, b, c = (
            (value + int.from_bytes(data[at + n : at + n + 4], "little")) & _MASK
            for value, n in ((a, 0), (b, 4), (c, 8))
        )
        for bits in (4, 6, 8, 16, 19, 4):
            # Six steps of one form: the three numbers change places after each.
            a = ((a - c) ^ _rotated(c, bits)) & _MASK
            c = (c + b) & _MASK
            a, b, c = b, c, a
        at += 12
    rest = data[at:]
    if not rest:
        return c
    rest = rest.ljust(12, b"\0")
    a = (a + int.from_bytes(rest[0:4], "little")) & _MASK
    b = (b + int.from_bytes(rest[4:8], "little")) & _MASK
    c = (c + int.from_bytes(rest[8:12], "little")) & _MASK
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, bits)) & _MASK
        a, b, c = b, c, a
    return b
