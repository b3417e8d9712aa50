from __future__ import annotations

import dataclasses
import enum
import io
import json
from collections.abc import Iterator
from typing import ClassVar

import pytest

from cxlfs.cli.output import (
    ExitError,
    Output,
    Report,
    Style,
    columns,
    document,
    quote,
    time_or_none,
    to_json,
)


class Kind(enum.Enum):
    FILE = 1


@dataclasses.dataclass(frozen=True)
class Inner:
    name: bytes
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Example(Report):
    schema: ClassVar[str] = "cxlfs.example/1"

    path: bytes
    kind: Kind
    size_bytes: int
    time: str | None
    parts: tuple[Inner, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        yield style.good(quote(self.path))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def example(path: bytes = b"/a") -> Example:
    return Example(path, Kind.FILE, 7, None, (Inner(b"\xff", 1),))


def test_json_has_the_schema_first_and_every_field() -> None:
    found = json.loads(document(example()))
    assert list(found) == ["schema", "path", "kind", "size_bytes", "time", "parts"]
    assert found == {
        "schema": "cxlfs.example/1",
        "path": "/a",
        "kind": "file",
        "size_bytes": 7,
        "time": None,
        "parts": [{"name": "\\xff", "name_b64": "/w==", "size_bytes": 1}],
    }


def test_json_is_one_line_of_valid_utf8() -> None:
    text = document(example("/ä\n\U0001f600".encode() + b"\xfe"))
    assert "\n" not in text
    assert json.loads(text.encode().decode("utf-8"))["path"] == "/ä\n\U0001f600\\xfe"


def test_lone_surrogates_never_reach_json() -> None:
    document(ExitError("cxlfs x", "failure", 1, "no \udcff", "do \udcfe")).encode("utf-8")


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        to_json(object())


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"/plain name", "/plain name"),
        ("/ä€".encode(), "/ä€"),
        (b"/a\x1b[31mred\x07", "/a\\x1b[31mred\\x07"),
        (b"/line\nbreak\ttab\rreturn", "/line\\nbreak\\ttab\\rreturn"),
        (b"/\xff\xfe", "/\\xff\\xfe"),
        (b"/back\\slash", "/back\\\\slash"),
        ("/\u202egnp".encode(), "/\\xe2\\x80\\xaegnp"),  # right-to-left override
    ],
)
def test_names_cannot_steer_a_terminal(name: bytes, shown: str) -> None:
    assert quote(name) == shown
    assert quote(name).isprintable()


def test_a_lone_surrogate_is_text_too() -> None:
    assert quote("\ud800w") == "\\xed\\xa0\\x80w"


def test_text_goes_to_stdout_and_is_plain_without_a_terminal() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    Output(as_json=False, stdout=stdout, stderr=stderr).report(example())
    assert (stdout.getvalue(), stderr.getvalue()) == ("/a\n", "")


def test_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stdout = Terminal()
    Output(as_json=False, stdout=stdout, stderr=io.StringIO()).report(example())
    assert stdout.getvalue() == "\x1b[32m/a\x1b[0m\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_switched_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(name, value)
    stdout = Terminal()
    Output(as_json=False, stdout=stdout, stderr=io.StringIO()).report(example())
    assert stdout.getvalue() == "/a\n"


def test_json_output_has_no_warnings_and_no_plain_text() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    output = Output(as_json=True, stdout=stdout, stderr=stderr)
    output.text("for people")
    output.warning("for people")
    output.failure(ExitError("cxlfs mkfs", "usage", 2, "wrong", "see --help"))
    assert stderr.getvalue() == ""
    assert json.loads(stdout.getvalue()) == {
        "schema": "cxlfs.exit_error/1",
        "message_type": "exit_error",
        "command": "cxlfs mkfs",
        "id": "usage",
        "exit_code": 2,
        "message": "wrong",
        "next_step": "see --help",
    }


def test_a_failure_is_two_lines_on_stderr() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    output = Output(as_json=False, stdout=stdout, stderr=stderr)
    output.failure(ExitError("cxlfs mkfs", "usage", 2, "wrong", "see --help"))
    assert stdout.getvalue() == ""
    assert stderr.getvalue() == "cxlfs mkfs: wrong\nnext: see --help\n"


def test_what_the_encoding_lacks_is_escaped() -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    Output(as_json=False, stdout=stdout, stderr=io.StringIO()).text("ä \udcff")
    stdout.flush()
    assert raw.getvalue() == b"\\xe4 \\udcff\n"


def test_columns_line_up() -> None:
    assert list(columns([("a", "1"), ("long", "2")])) == ["   a: 1", "long: 2"]
    assert list(columns([])) == []


def test_unknown_times_are_null() -> None:
    assert time_or_none(0) is None
    assert time_or_none(None) is None
    assert time_or_none(1_000_000_000_123_456_789) == "2001-09-09T01:46:40.123Z"
