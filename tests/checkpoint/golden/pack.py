"""A directory as a ``.tar.xz`` that depends on the names and bytes in it alone."""

from __future__ import annotations

import tarfile
from pathlib import Path


def pack(directory: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=9, format=tarfile.PAX_FORMAT) as target:
        for path in sorted(directory.rglob("*")):
            info = target.gettarinfo(path, str(path.relative_to(directory)))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = 0
            info.pax_headers.clear()
            if path.is_file():
                with path.open("rb") as source:
                    target.addfile(info, source)
            else:
                target.addfile(info)
    print(archive.name, archive.stat().st_size)
