"""Plug-ins into training frameworks, each in a module of its own that knows the others not.

Modules of a package that import its framework are themselves imported when something is asked for.

Never: what a checkpoint of a job is (``job``); a framework that nobody asked for. A module here can
be imported without its framework; who uses it then gets FrameworkMissingError, with the extra to
install.
"""

from __future__ import annotations

import importlib

from cxlfs.errors import FrameworkMissingError


def require(framework: str, extra: str) -> None:
    """Imports it. Raises FrameworkMissingError; and what a framework that is there raises."""
    try:
        importlib.import_module(framework)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != framework.partition(".")[0]:
            raise
        raise FrameworkMissingError(
            f"this adapter needs {framework}, which is not installed",
            next_step=f"pip install 'cxlfs[{extra}]'",
        ) from None
