"""Archives of ``torch.save`` as an exception in mid-save leaves them."""

from __future__ import annotations

import io
import zipfile

WRITERS_OWN = ("version", "byteorder", ".data/serialization_id")
"""Records that PyTorch's writer adds when it ends an archive, in this order, where they are not
there yet."""


def records(data: bytes) -> list[str]:
    """What ``torch.save`` puts into an archive, without what the writer adds, in its order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    return [name for name in names if name not in ("version", ".data/serialization_id")]


def ended_early(data: bytes, count: int) -> bytes:
    """The archive with the first ``count`` of :func:`records`."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as whole, zipfile.ZipFile(made, "w") as cut:
        root = whole.namelist()[0].partition("/")[0]
        names = records(data)[:count]
        for name in [*names, *(name for name in WRITERS_OWN if name not in names)]:
            if f"{root}/{name}" in whole.namelist():
                info = zipfile.ZipInfo(f"{root}/{name}")
                cut.writestr(info, whole.read(f"{root}/{name}"))
    return made.getvalue()
