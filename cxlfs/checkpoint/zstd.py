"""Frames of Zstandard: inflated within a limit, or gone through to see that they are whole.

The standard library's from Python 3.14 on, ``backports.zstd`` before. Without dictionaries.

Never here: what the bytes mean. Memory: one piece, and the library's window of at most 128 MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError

if sys.version_info >= (3, 14):
    from compression import zstd as library
else:
    from backports import zstd as library

ZstdError = library.ZstdError
"""Of bytes that are not what a frame has."""
_WINDOW_BITS_MAX = 27
"""Of a frame: 128 MiB, as its own program has it, and the library's default."""


def machine() -> library.ZstdDecompressor:
    """What inflates one frame, piece by piece; its methods raise ZstdError."""
    limit = library.DecompressionParameter.window_log_max
    return library.ZstdDecompressor(options={limit: _WINDOW_BITS_MAX})


def inflate(data: bytes, limit: int) -> bytes:
    """The content of one frame, which ``data`` begins with; never more than ``limit`` bytes.

    Raises DamagedError, BeyondLimitsError.
    """
    try:
        if library.get_frame_info(data).dictionary_id:
            raise BeyondLimitsError("it is compressed with a dictionary")
        stream = machine()
        found = stream.decompress(data, limit + 1)
    except ZstdError as error:
        raise DamagedError("compressed bytes are damaged") from error
    if len(found) > limit:
        raise BeyondLimitsError("it inflates to more than is read")
    if not stream.eof:
        raise DamagedError("compressed bytes are cut")
    return found


def is_frame(pieces: Iterator[bytes]) -> bool:
    """Whether they are one frame and nothing else. Raises BeyondLimitsError."""
    stream = machine()
    left = limits.FRAME_BYTES_MAX
    try:
        for piece in pieces:
            left -= len(stream.decompress(piece, limits.READ_BYTES))
            while not stream.eof and not stream.needs_input:
                left -= len(stream.decompress(b"", limits.READ_BYTES))
                if left < 0:
                    raise BeyondLimitsError("a value of it inflates to more than is read")
    except (ZstdError, EOFError):  # EOFError: bytes follow the frame
        return False
    return stream.eof and not stream.unused_data
