"""Types of items: the names that formats give them, and what the bits of each mean.

NumPy has none for bfloat16 and for floats of eight bits. Both are described here by their bits, and
so are those that NumPy has: a sign, an exponent, a fraction.

Other modules read the items (``blocks``) and compute with them (``reducing``).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re

import numpy as np
from numpy.typing import NDArray


class Kind(enum.Enum):
    """How the items of a type are computed with."""

    FLOAT = "float"
    """16, 32 or 64 bits, ordered as integers with a sign are."""
    BYTE = "byte"
    """8 bits: each of the 256 patterns has a value in a table."""
    INTEGER = "integer"
    """16, 32 or 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class ItemType:
    """``name``: as PyTorch and NumPy say it. ``bits``: of one component; ``components`` is 2 for
    complex numbers, whose real and imaginary parts count one by one.
    """

    name: str
    kind: Kind
    bits: int
    exponent_bits: int = 0
    components: int = 1
    is_signed: bool = True
    is_big_endian: bool = False

    @property
    def component_bytes(self) -> int:
        return self.bits // 8

    @property
    def item_bytes(self) -> int:
        return self.component_bytes * self.components

    @property
    def fraction_bits(self) -> int:
        return self.bits - 1 - self.exponent_bits

    @property
    def infinity_bits(self) -> int:
        """Of a FLOAT: what lies above it, without the sign, is no number."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def is_float(self) -> bool:
        return self.exponent_bits > 0

    def same_as(self, other: ItemType) -> bool:
        """True if equal bits are equal values, in whatever order the bytes are."""
        return (self.name, self.components) == (other.name, other.components)


def _float(name: str, bits: int, exponent_bits: int, components: int = 1) -> ItemType:
    kind = Kind.BYTE if bits == 8 else Kind.FLOAT
    return ItemType(name, kind, bits, exponent_bits, components)


def _integer(name: str, bits: int, *, is_signed: bool) -> ItemType:
    kind = Kind.BYTE if bits == 8 else Kind.INTEGER
    return ItemType(name, kind, bits, is_signed=is_signed)


_TYPES = {
    each.name: each
    for each in (
        _float("float64", 64, 11),
        _float("float32", 32, 8),
        _float("float16", 16, 5),
        _float("bfloat16", 16, 8),
        _float("float8_e5m2", 8, 5),
        _float("float8_e5m2fnuz", 8, 5),
        _float("float8_e4m3fn", 8, 4),
        _float("float8_e4m3fnuz", 8, 4),
        _float("float8_e4m3b11fnuz", 8, 4),
        _float("float8_e8m0fnu", 8, 8),
        _float("complex128", 64, 11, 2),
        _float("complex64", 32, 8, 2),
        _float("complex32", 16, 5, 2),
        _integer("int64", 64, is_signed=True),
        _integer("int32", 32, is_signed=True),
        _integer("int16", 16, is_signed=True),
        _integer("int8", 8, is_signed=True),
        _integer("uint64", 64, is_signed=False),
        _integer("uint32", 32, is_signed=False),
        _integer("uint16", 16, is_signed=False),
        _integer("uint8", 8, is_signed=False),
        _integer("bool", 8, is_signed=False),
    )
}
_OTHER_NAMES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "qint8": "int8",
    "quint8": "uint8",
    "qint16": "int16",
    "quint16": "uint16",
    "qint32": "int32",
    # safetensors
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NUMPY = re.compile(r"[<>|=]([biufc?])(\d{1,2})")
_NUMPY_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@functools.cache
def item_type(name: str) -> ItemType | None:
    """By any name that a format gives it; None: its items are not computed with (texts, objects,
    items of fewer than eight bits, structures).
    """
    is_big_endian = name.startswith(">")
    match = _NUMPY.fullmatch(name)
    if match is not None:
        bits = 8 * int(match[2])
        kind = _NUMPY_KINDS.get(match[1], "")
        plain = kind if kind == "bool" and bits == 8 else f"{kind}{bits}"
    else:
        plain = name.removeprefix(">")
        plain = _OTHER_NAMES.get(plain, plain)
    found = _TYPES.get(plain)
    if found is None or not is_big_endian or found.bits == 8:
        return found
    return dataclasses.replace(found, is_big_endian=True)


@functools.cache
def byte_values(name: str) -> NDArray[np.float64]:
    """The value of each pattern of a type of eight bits: NaN and Inf where it has them."""
    found = _TYPES[name]
    if not found.is_float:
        patterns = np.arange(256, dtype=np.uint8)
        return (patterns.view(np.int8) if found.is_signed else patterns).astype(np.float64)
    return np.array([_byte_value(pattern, found) for pattern in range(256)], dtype=np.float64)


def _byte_value(pattern: int, found: ItemType) -> float:
    """Source: the OCP specification of 8-bit floating point, and ml_dtypes for the kinds that end
    in fnuz (no negative zero, one NaN).
    """
    if found.name == "float8_e8m0fnu":
        return math.nan if pattern == 255 else 2.0 ** (pattern - 127)
    is_one_nan = found.name.endswith("fnuz")
    sign = -1.0 if pattern & 0x80 else 1.0
    exponent = pattern >> found.fraction_bits & ((1 << found.exponent_bits) - 1)
    fraction = pattern & ((1 << found.fraction_bits) - 1)
    bias = (1 << (found.exponent_bits - 1)) - 1 + is_one_nan
    if "b11" in found.name:
        bias = 11
    is_last = exponent == (1 << found.exponent_bits) - 1
    if is_one_nan and pattern == 0x80:
        return math.nan
    if found.name == "float8_e5m2" and is_last:
        return math.nan if fraction else sign * math.inf
    if found.name == "float8_e4m3fn" and pattern & 0x7F == 0x7F:
        return math.nan
    scaled = fraction / (1 << found.fraction_bits)
    if exponent:
        return sign * math.ldexp(1 + scaled, exponent - bias)
    return sign * math.ldexp(scaled, 1 - bias)
