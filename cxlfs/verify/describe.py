"""The tables of docs/verify.md, made from those that the program works by.

Never here: what is not in those tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cxlfs.verify.findings import KINDS
from cxlfs.verify.passes import PASSES

BEGIN_MARK: Final = "<!-- passes and findings: written by scripts/update-verify -->"
END_MARK: Final = "<!-- end of passes and findings -->"


def markdown() -> str:
    """What stands between the marks."""
    return "\n".join([BEGIN_MARK, "", *_passes(), "", *_findings(), "", END_MARK])


def _passes() -> Iterator[str]:
    yield "| pass | name | needs | what holds in a good store |"
    yield "| ---: | --- | --- | --- |"
    for each in PASSES:
        name = f"{each.name} (data)" if each.data else each.name
        yield f"| {each.id} | {name} | {each.needs or '-'} | {each.text} |"


def _findings() -> Iterator[str]:
    yield "| finding | pass | severity | repair | meaning | next step |"
    yield "| --- | ---: | --- | --- | --- | --- |"
    for kind in KINDS.values():
        repair = "yes" if kind.repairable else "no"
        yield (
            f"| `{kind.id}` | {kind.pass_id} | {kind.severity} | {repair} "
            f"| {kind.text} | {kind.next_step} |"
        )
