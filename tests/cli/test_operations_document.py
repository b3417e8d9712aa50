"""docs/operations.md names every key that the program writes, and no other."""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import cxlfs
from cxlfs import cli
from cxlfs.cli.dump import Structure
from cxlfs.cli.output import Report
from cxlfs.cli.verify_reports import FindingReport, RemainingReport
from cxlfs.verify import inspect

TEXT = (Path(cxlfs.__file__).parent.parent / "docs" / "operations.md").read_text("utf-8")


def reports() -> Iterator[type[Report]]:
    """Every kind of document of the program. Not ``__subclasses__``: a dataclass with slots leaves
    the class that it was made from there.
    """
    for verb in ("output", "progress", "mounts", "verify_reports", "verify_inside", *cli.VERBS):
        for found in vars(importlib.import_module(f"cxlfs.cli.{verb}")).values():
            is_report = isinstance(found, type) and issubclass(found, Report)
            if is_report and found.__module__ == f"cxlfs.cli.{verb}" and found is not Report:
                yield found


DOCUMENTED_BY_TABLE = [found for found in reports() if found not in (Structure, RemainingReport)]


def keys_of(found: type) -> Iterator[str]:
    """Names as the tables write them: ``media.kind``, ``checkpoints[].path``."""
    hints = typing.get_type_hints(found)
    for field in dataclasses.fields(found):
        for part, suffix in parts_of(hints[field.name]):
            if dataclasses.is_dataclass(part):
                yield from (f"{field.name}{suffix}.{key}" for key in keys_of(part))
            else:
                yield field.name


def parts_of(hint: object) -> Iterator[tuple[type, str]]:
    """The type itself, or what a tuple is made of."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        yield arguments[0], "[]" if dataclasses.is_dataclass(arguments[0]) else ""
    elif isinstance(hint, type):
        yield hint, ""
    else:
        assert isinstance(hint, types.UnionType)
        yield object, ""


def section(found: type[Report]) -> str:
    """The part of the document that describes it."""
    _, _, text = TEXT.partition(f"\n### `{found.schema}`\n")
    text = re.split(r"\n###? ", text)[0]
    if found.schema == "cxlfs.verify/1":
        _, _, text = text.partition(f"\n#### `{found.message_type}`\n")
        text = text.split("\n#### ")[0]
    return text


@pytest.mark.parametrize("found", DOCUMENTED_BY_TABLE, ids=lambda found: found.__name__)
def test_keys(found: type[Report]) -> None:
    documented = re.findall(r"^\| `([^`]+)` \|", section(found), re.MULTILINE)
    assert documented == list(keys_of(found))


def test_every_document_has_a_schema() -> None:
    schemas = {found.schema for found in reports()}
    assert all(re.fullmatch(r"cxlfs\.[a-z_]+/1", schema) for schema in schemas)
    assert set(re.findall(r"^### `(cxlfs\.[^`]+)`$", TEXT, re.MULTILINE)) == schemas


def test_remaining_has_the_keys_of_a_finding() -> None:
    assert list(keys_of(RemainingReport)) == list(keys_of(FindingReport))
    assert "#### `remaining`" in TEXT


def test_dump_names_every_structure() -> None:
    source = Path(inspect.__file__ or "").read_text("utf-8")
    written = set(re.findall(r'structure="([a-z ]+)"', source))
    table = re.findall(r"^\| `([a-z ]+)` \| `", section(Structure), re.MULTILINE)
    assert set(table) == written


def test_commands_in_the_document_are_verbs() -> None:
    named = set(re.findall(r"\bcxlfs ([a-z]+) ", re.sub(r"cxlfs store", "", TEXT)))
    assert set(cli.VERBS) <= named


def test_states_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| `([A-Z-]+)` \|", TEXT, re.MULTILINE)
    assert rows == ["ONLINE", "OFFLINE", "READ-ONLY", "NEEDS-CHECK"]
