"""How much one request of the kernel carries: as much as it permits, and answers that fit a pipe.

Never here: making the pipes that answers go through (csrc/transport/splice.c).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 4 << 20
"""Where the kernel's limit was raised: each thread that serves has a buffer of that size."""
SPLICE_BYTES_MIN = 64 << 10
"""From here on a pipe is faster than writev: csrc/transport/splice.c has the figures."""
_PAGES_DEFAULT = 256
"""What one request carries where fs.fuse.max_pages_limit does not say (before Linux 6.13)."""
_FEW_BYTES = 128 << 10
"""Less than that in a request, and most of the time goes into asking."""


class RequestSizes(NamedTuple):
    """Bytes, in whole pages. ``read``: at most ``request``."""

    request: int
    read: int


def request_sizes(proc_root: Path = Path("/proc")) -> RequestSizes:
    """What to ask of the kernel on this machine, with the rights of this process."""
    page = os.sysconf("SC_PAGE_SIZE")
    limit = proc_root / "sys" / "fs" / "fuse" / "max_pages_limit"
    pages = _PAGES_DEFAULT
    with contextlib.suppress(OSError, ValueError):
        pages = max(1, int(limit.read_text("ascii")))
    request = min(pages * page, max(page, REQUEST_BYTES_MAX))
    if request < _FEW_BYTES:
        log.warning(
            "requests carry %d KiB at most, which is slow: fs.fuse.max_pages_limit is %d; "
            "raise it (sysctl fs.fuse.max_pages_limit=%d) and mount again",
            *(request >> 10, pages, _PAGES_DEFAULT),
        )
    return RequestSizes(request, answer_bytes_max(request, pipe_bytes_max(request + 2 * page)))


def answer_bytes_max(request_bytes: int, pipe_bytes: int) -> int:
    """The largest READ to ask for: half of a request that does not fit the pipe, or half of that.

    A pipe takes one page at a time, one for the header, and one more where the data does not begin
    on a page. Where only short answers would fit, all are written, as long as they may be.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    answer = request_bytes
    while answer + 2 * page > pipe_bytes:
        answer = answer // 2 // page * page
        if answer < max(page, SPLICE_BYTES_MIN):
            return request_bytes
    return answer


def pipe_bytes_max(wanted_bytes: int) -> int:
    """How large a pipe this process gets, if not as large as it wants; 0: none."""
    try:
        ends = os.pipe2(os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        while wanted_bytes >= SPLICE_BYTES_MIN:
            with contextlib.suppress(OSError):
                return fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, wanted_bytes)
            wanted_bytes //= 2
        return fcntl.fcntl(ends[1], fcntl.F_GETPIPE_SZ)
    finally:
        for end in ends:
            os.close(end)
