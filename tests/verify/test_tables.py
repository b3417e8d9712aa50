"""What is permanent, what is documented, and what travels over the control socket."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from cxlfs.verify import (
    ERROR,
    KINDS,
    PASSES,
    WARNING,
    Finding,
    Progress,
    Use,
    finding_from_dict,
    finding_to_dict,
    progress_from_dict,
    progress_to_dict,
)
from cxlfs.verify.describe import BEGIN_MARK, END_MARK, markdown
from cxlfs.verify.findings import make

ROOT = Path(__file__).resolve().parents[2]

RELEASED_PASSES = {
    1: "superblock",
    2: "roots",
    3: "segments",
    4: "journal",
    5: "image",
    6: "state",
    7: "extents",
    8: "namespace",
    9: "references",
    10: "space",
    11: "data",
}
"""Numbers that mean something to others: a pass may go, its number and name never change."""


def test_numbers_of_passes_are_permanent() -> None:
    found = {each.id: each.name for each in PASSES}
    assert len(found) == len(PASSES)
    for number, name in found.items():
        assert RELEASED_PASSES[number] == name


def test_every_pass_can_find_something_and_every_kind_has_a_pass() -> None:
    assert {kind.pass_id for kind in KINDS.values()} == {each.id for each in PASSES}
    assert len(KINDS) == len({kind.text for kind in KINDS.values()})


def test_only_warnings_can_be_repaired() -> None:
    for kind in KINDS.values():
        assert kind.severity in (ERROR, WARNING)
        assert not (kind.repairable and kind.severity == ERROR)
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", kind.id)
        assert kind.next_step


def test_a_severity_of_its_own_decides_what_comes_next() -> None:
    assert not make("root-lost", "x", severity=ERROR).repairable
    repairable = make("image-damaged", "x", severity=WARNING)
    assert repairable.repairable
    assert "--repair" in repairable.next_step


def test_the_document_has_the_tables_of_the_program() -> None:
    text = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(BEGIN_MARK)
    inner, _, _ = rest.partition(END_MARK)
    assert f"{BEGIN_MARK}{inner}{END_MARK}" == markdown(), "run scripts/update-verify"


@pytest.mark.parametrize("path", [b"/plain", b"/not utf-8 \xff\xfe", None])
def test_findings_survive_json(path: bytes | None) -> None:
    use = Use(ino=5, path=path, file_offset=7, length=9, version="live")
    finding = make(
        "data-checksum", "a message", media_offset=4096, expected=1, actual=2, uses=(use,)
    )
    assert finding.path == path
    again = finding_from_dict(json.loads(json.dumps(finding_to_dict(finding))))
    assert again == finding


def test_progress_survives_json_with_keys_that_are_not_known() -> None:
    progress = Progress(pass_id=3, name="segments", done=1, total=2, unit="items", skipped="why")
    message = {"message_type": "progress", **progress_to_dict(progress)}
    assert progress_from_dict(json.loads(json.dumps(message))) == progress


def test_fields_of_a_finding() -> None:
    """What the command line shows and documents."""
    assert [field.name for field in dataclasses.fields(Finding)] == [
        "id",
        "pass_id",
        "structure",
        "severity",
        "repairable",
        "message",
        "next_step",
        "media_offset",
        "ino",
        "path",
        "expected",
        "actual",
        "uses",
    ]
