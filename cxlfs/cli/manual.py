"""The manual pages, made from the commands themselves: what --help says, in the form of man(7).

Never here: text about a command (its file), writing files (``scripts/update-man``).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click

from cxlfs.cli.program import SHORT_HELP, command

SECTION = 8
_SYSTEM = {
    "mount.cxlfs": ("mount_command", "mount a cxlfs store, called by mount(8)"),
    "fsck.cxlfs": ("fsck_command", "check a cxlfs store, called by fsck(8)"),
}


def pages() -> dict[str, str]:
    """File name and text of every page."""
    found = {f"cxlfs.{SECTION}": _overview()}
    for verb, summary in SHORT_HELP.items():
        module = importlib.import_module(f"cxlfs.cli.{verb}")
        name = f"cxlfs-{verb}"
        found[f"{name}.{SECTION}"] = _page(name, f"cxlfs {verb}", module.command, summary)
    system = importlib.import_module("cxlfs.cli.system")
    for name, (attribute, summary) in _SYSTEM.items():
        found[f"{name}.{SECTION}"] = _page(name, name, getattr(system, attribute), summary)
    return found


def _overview() -> str:
    lines = [*_head("cxlfs", "a crash-atomic, checksummed checkpoint store on persistent memory")]
    lines += [".SH SYNOPSIS", ".B cxlfs", "[OPTIONS] COMMAND [ARGS]..."]
    lines += [".SH DESCRIPTION", *_text(command.help or "")]
    lines += [".SH COMMANDS"]
    for verb, summary in SHORT_HELP.items():
        lines += [".TP", rf"\fBcxlfs\-{verb}\fR({SECTION})", _escape(summary)]
    lines += [".SH OPTIONS", *_options(command, "cxlfs")]
    lines += [".SH FILES"]
    lines += [".TP", ".I /run/cxlfs", "Sockets, registrations and logs of root's daemons."]
    lines += [".TP", ".I $XDG_RUNTIME_DIR/cxlfs", "The same of an ordinary user."]
    lines += [".TP", ".I /etc/cxlfs", r"Sources and options of services: cxlfs\-service(8)."]
    lines += [".SH SEE ALSO", _see_also("cxlfs")]
    return "\n".join(lines) + "\n"


def _page(name: str, program: str, found: click.Command, summary: str) -> str:
    lines = [*_head(name, summary[:1].lower() + summary[1:].rstrip("."))]
    lines += [".SH SYNOPSIS", f".B {_escape(program)}", _usage(found, program)]
    lines += [".SH DESCRIPTION", *_text(found.help or "")]
    lines += [".SH OPTIONS", *_options(found, program)]
    if isinstance(found, click.Group):
        for verb, inner in found.commands.items():
            lines += [f".SH {_escape(verb.upper())}", f".B {_escape(program)} {verb}"]
            lines += [_usage(inner, verb), ".PP", *_text(inner.help or ""), *_options(inner, verb)]
    if found.epilog:
        lines += [".SH EXIT STATUS", *_text(found.epilog.replace("Exit codes:\n", ""))]
    lines += [".SH SEE ALSO", _see_also(name)]
    return "\n".join(lines) + "\n"


def _head(name: str, summary: str) -> Iterator[str]:
    yield r".\" Made by scripts/update-man from the commands of cxlfs."
    yield f".TH {_escape(name.upper())} {SECTION}"
    yield ".SH NAME"
    yield rf"{_escape(name)} \- {_escape(summary)}"


def _see_also(name: str) -> str:
    others = ["cxlfs", *(f"cxlfs-{verb}" for verb in SHORT_HELP), *_SYSTEM]
    return ", ".join(f"{_escape(other)}({SECTION})" for other in others if other != name)


def _usage(found: click.Command, name: str) -> str:
    return _escape(" ".join(found.collect_usage_pieces(_context(found, name))))


def _context(found: click.Command, name: str) -> click.Context:
    """As when it is run: a command keeps the help option of the first context that it sees."""
    return found.context_class(found, info_name=name, **found.context_settings)


def _text(text: str) -> Iterator[str]:
    """Paragraphs; those that begin with a backspace are kept line by line, as in --help."""
    for number, paragraph in enumerate(text.strip("\n").split("\n\n")):
        if number:
            yield ".PP"
        is_literal = paragraph.startswith("\b\n")
        if is_literal:
            yield ".nf"
        yield from (_escape(line) for line in paragraph.removeprefix("\b\n").splitlines())
        if is_literal:
            yield ".fi"


def _options(found: click.Command, name: str) -> Iterator[str]:
    context = _context(found, name)
    for parameter in found.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            names, text = record
            yield from (".TP", rf"\fB{_escape(names)}\fR", _escape(text))


def _escape(text: str) -> str:
    """No character of a line steers troff: see groff_char(7)."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
