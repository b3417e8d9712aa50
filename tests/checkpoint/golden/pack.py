"""Directories as ``.tar.xz`` files that depend on the names and bytes in them alone."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


def pack_each(makers: Mapping[str, Callable[[Path], object]]) -> None:
    """What those make that the command line names, or all."""
    for name in sys.argv[1:] or makers:
        with tempfile.TemporaryDirectory() as directory:
            makers[name](Path(directory))
            pack(Path(directory), Path(__file__).resolve().with_name(f"{name}.tar.xz"))


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
