"""What all verbs share: the options --json and --debug, and how --help looks.

Never here: anything that one verb alone needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

ANY_PATH = click.Path(readable=False)
"""Whether it can be used is found out by using it: what click asks for, a dead mount refuses."""


_DEBUG_KEY = "cxlfs.debug"


def _remember_debug(context: click.Context, _parameter: click.Parameter, value: object) -> None:
    if value:
        context.meta[_DEBUG_KEY] = True


def debug_option(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--debug``; ``program.run`` sees it, a verb asks :func:`wants_debug`."""
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_remember_debug,
        help="Show where an error came from.",
    )(function)


def wants_debug() -> bool:
    return bool(click.get_current_context().meta.get(_DEBUG_KEY, False))


def common_options(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--json`` (argument ``as_json``) and ``--debug``."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Write JSON instead of text; the schemas are in docs/operations.md.",
    )(debug_option(function))
