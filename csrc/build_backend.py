"""The build backend of pyproject.toml: setuptools, after the C that cffi makes of the headers.

What is generated lies below ``build/``, which belongs to nobody: it is made anew for each build of
a wheel, also of an editable one, and no source distribution carries it.

Invariants
- ``generate`` writes nothing where the result would be the same: an object file stays usable.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI
from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "generate",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

MODULE = "cxlfs._native"
HEADERS = (
    "csrc/cxlfs.h",
    "csrc/client/direct.h",
    "csrc/cxl_direct.h",
    "csrc/client/client.h",
    "csrc/library/cxlfs_client.h",
)
"""What Python sees, each after those that it uses."""
GENERATED = "build/generated/_native_ffi.c"
"""One of the extension's sources."""


def declarations(header: str) -> str:
    """What cffi parses: neither preprocessor lines (each with those that it goes on in), nor
    assertions, nor comments, nor what is for C++.
    """
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"^_Static_assert\(.*?\);", "", text, flags=re.DOTALL | re.MULTILINE)


def generate(root: Path) -> Path:
    """Write the C between Python and the headers below ``root``, a source tree; its path."""
    path = root / GENERATED
    path.parent.mkdir(parents=True, exist_ok=True)
    ffi = FFI()
    for header in HEADERS:
        ffi.cdef(declarations((root / header).read_text(encoding="utf-8")))
    below = [Path(header).relative_to("csrc") for header in HEADERS]
    ffi.set_source(MODULE, "\n".join(f'#include "{header}"' for header in below))
    ffi.emit_c_code(str(path))
    return path


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str | list[str]] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """As PEP 517 has it."""
    generate(Path.cwd())
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, str | list[str]] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """As PEP 660 has it."""
    generate(Path.cwd())
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
