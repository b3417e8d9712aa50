"""``cxlfs job``: what a directory of a job's checkpoints holds, and the operator's decisions.

Never here: what counts (``job.protocol``), how records lie in a directory (``job.lines``).
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.errors import JobFilesError, NotFoundError, UsageError
from cxlfs.job import files, lines, medium
from cxlfs.job.protocol import Attempt, Decision, Inventory, Line

HELP = """Show the history of a job's checkpoints, and decide what its stores cannot.

A start of a job is a line. Its checkpoints descend from the one that it resumed from. If old
stores come back with checkpoints that no later one descends from, the job has two histories, and
no start chooses between them: an operator does, on one node. The next start follows the decision.
Nothing is removed before that.

\b
Examples:
  cxlfs job status /mnt/ckpt/run1
  cxlfs job decide /mnt/ckpt/run1 --resume 7f3a
"""

STATUS_HELP = """Show what ROOT holds, and what the last start asked.

ROOT is the directory that the job's Checkpointer has on this node.

\b
Example:
  cxlfs job status /mnt/ckpt/run1 --json
"""

DECIDE_HELP = """Answer what the last start asked: resume at a checkpoint, or begin anew.

LINE is the id of a line, or how it begins; NUMBER is that of one of its checkpoints. Without a
number the last one counts of those that the start could have loaded. Other histories that the
start saw are given up, and their room is given back after the next commit. A history that it did
not see is asked about when its store comes back.

\b
Examples:
  cxlfs job decide /mnt/ckpt/run1 --resume 7f3a
  cxlfs job decide /mnt/ckpt/run1 --resume 7f3a/4
  cxlfs job decide /mnt/ckpt/run1 --anew
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """``line``: of the start that saved it; empty: before there were lines."""

    step: int
    number: int
    line: str
    committed: bool
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, attempt: Attempt, inventory: Inventory) -> Checkpoint:
        ranks = tuple(held.rank for held in inventory.held if held.attempt == attempt)
        committed = attempt in {commit.attempt for commit in inventory.commits}
        return cls(attempt.step, attempt.number, attempt.id, committed, ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One line. ``from_line``, ``from_number``: what it resumed from; empty and 0: nothing."""

    line: str
    began: str
    from_line: str
    from_number: int
    stores: int
    is_provisional: bool

    @classmethod
    def of(cls, line: Line) -> Start:
        parent = line.parent
        began = _time(line.began)
        from_line, number = ("", 0) if parent is None else (parent.id, parent.number)
        stores = len(set(line.members))
        return cls(line.id, began, from_line, number, stores, line.is_provisional)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that an operator may name. ``is_head``: no other that was seen descends from
    it; ``loadable``: the start could have loaded it.
    """

    step: int
    number: int
    line: str
    is_head: bool
    loadable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Status(Report):
    """What a directory holds. ``asked``: when the last start asked; empty: it asked nothing."""

    schema: ClassVar[str] = "cxlfs.job/1"

    root: bytes
    store: str
    job: str
    owner: str
    starts: tuple[Start, ...]
    checkpoints: tuple[Checkpoint, ...]
    asked: str
    reasons: tuple[str, ...]
    choices: tuple[Choice, ...]
    decided: str

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.strong('  root')}: {quote(self.root)}"
        yield f" store: {self.store}"
        yield f"   job: {self.job or 'none yet'}"
        yield f" owner: {self.owner or 'none'}"
        for start in self.starts:
            origin = f"from {start.from_line}/{start.from_number}" if start.from_line else "anew"
            unsure = ", without stores that may have more" if start.is_provisional else ""
            yield f"  line: {start.line}, {start.began}, {origin}, {start.stores} stores{unsure}"
        for each in self.checkpoints:
            state = "committed" if each.committed else "voted for"
            ranks = ", ".join(map(str, each.ranks)) or "none"
            yield f"  step: {each.step}, {each.line}/{each.number}, {state}, shards of rank {ranks}"
        if self.asked:
            yield f" asked: {self.asked}: {'; '.join(self.reasons)}"
        for choice in self.choices:
            loadable = "can be loaded" if choice.loadable else "cannot be loaded"
            head = "the last of its history" if choice.is_head else "an earlier one"
            yield f"choice: {choice.line}/{choice.number}, step {choice.step}, {head}, {loadable}"
        if self.decided:
            yield f"decided: {self.decided}"
        elif self.choices:
            yield f"next: cxlfs job decide {quote(self.root)} --resume LINE"

    @classmethod
    def of(cls, root: Path) -> Status:
        """Raises JobFilesError, OSError."""
        store = medium.identity(root)
        inventory, _ = files.take_stock(root, store)
        owner, question = lines.owner_of(root), lines.question_in(root)
        attempts = {held.attempt for held in inventory.held}
        attempts |= {commit.attempt for commit in inventory.commits}
        return cls(
            os.fsencode(root),
            store,
            inventory.job,
            "" if owner is None else str(owner),
            tuple(Start.of(each) for each in sorted(inventory.lines, key=lambda x: x.began)),
            tuple(Checkpoint.of(each, inventory) for each in sorted(attempts)),
            "" if question is None else _time(question.asked),
            () if question is None else question.reasons,
            () if question is None else tuple(_choices(question)),
            _told(inventory.decision),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Decided(Report):
    """What the next start will do. ``line``: empty: it begins anew."""

    schema: ClassVar[str] = "cxlfs.job_decision/1"

    root: bytes
    step: int
    line: str
    number: int

    def lines(self, style: Style, /) -> Iterator[str]:
        if self.line:
            way = f"resumes at step {self.step}, {self.line}/{self.number}"
        else:
            way = "begins anew"
        yield f"{style.strong('decided')}: the next start of the job {way}"
        yield "next: start the job"


def _choices(question: lines.Question) -> Iterator[Choice]:
    named = dict.fromkeys((*question.heads, *question.loadable))
    for each in named:
        is_head, loadable = each in question.heads, each in question.loadable
        yield Choice(each.step, each.number, each.id, is_head, loadable)


def _told(decision: Decision | None) -> str:
    if decision is None:
        return ""
    return "begin anew" if decision.resume is None else f"resume at {decision.resume}"


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


_NAMED = re.compile(r"([0-9a-f]{1,20})(?:/([0-9]{1,18}))?", re.ASCII)


def _resume(question: lines.Question, text: str) -> Attempt:
    """Raises UsageError, NotFoundError."""
    named = _NAMED.fullmatch(text)
    if named is None:
        raise UsageError(f"not a line: {text!r}", next_step="write LINE, or LINE/NUMBER")
    begins, number = named[1], named[2]
    found = [
        each
        for each in question.loadable
        if each.id.startswith(begins) and (number is None or each.number == int(number))
    ]
    known = ", ".join(f"{each.id}/{each.number}" for each in question.loadable) or "none"
    if not found:
        raise NotFoundError(
            f"no checkpoint {text} that the last start could load: there are {known}",
            next_step="bring the stores that have it back, start the job, and decide then",
        )
    if len({each.id for each in found}) > 1:
        raise UsageError(f"{text} begins several lines: {known}", next_step="write more of it")
    return max(found)


@click.group(
    "job",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*(e.exit_code for e in (UsageError, NotFoundError, JobFilesError))),
)
@common_options
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> None:
    """See HELP."""
    context.obj = as_json


def _is_json(*, as_json: bool) -> bool:
    """``--json`` may stand before the second verb or behind it."""
    return as_json or bool(click.get_current_context().obj)


def _root(path: str) -> Path:
    root = Path(path)
    if not (root / medium.IDENTITY_NAME).exists():
        raise NotFoundError(
            f"{path}: no checkpoints of a job are here",
            next_step="name the directory that the job's Checkpointer has on this node",
        )
    return root


@command.command("status", help=STATUS_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("root", type=ANY_PATH)
@common_options
def status(root: str, *, as_json: bool) -> None:
    """See STATUS_HELP."""
    Output(as_json=_is_json(as_json=as_json)).report(Status.of(_root(root)))


@command.command("decide", help=DECIDE_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("root", type=ANY_PATH)
@click.option("--resume", metavar="LINE[/NUMBER]", help="Resume at this checkpoint.")
@click.option("--anew", is_flag=True, help="Begin anew, where the start saw no checkpoint.")
@common_options
def decide(root: str, resume: str | None, *, anew: bool, as_json: bool) -> None:
    """See DECIDE_HELP."""
    if (resume is None) == (not anew):
        raise UsageError("either --resume or --anew", next_step="see cxlfs job status ROOT")
    place = _root(root)
    question = lines.question_in(place)
    if question is None:
        raise NotFoundError(
            f"{root}: the last start asked nothing", next_step="start the job; it asks if it must"
        )
    if anew and question.heads:
        raise UsageError(
            f"there are checkpoints: {', '.join(map(str, question.heads))}",
            next_step="to begin anew in spite of them, name another directory in the job",
        )
    chosen = None if resume is None else _resume(question, resume)
    lines.decide(place, Decision(chosen, question.heads))
    step, line, number = (0, "", 0) if chosen is None else (chosen.step, chosen.id, chosen.number)
    Output(as_json=_is_json(as_json=as_json)).report(
        Decided(os.fsencode(place), step, line, number)
    )
