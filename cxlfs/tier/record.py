"""Beside a checkpoint: in which tiers it lies, as ``drain`` found it there.

    DIR/.cxlfs-tier/NAME.json     {"format": 1, "tiers": [{"url": ..., "content_id": ...}]}

Never: asks a tier. What is written here was true when it was written, of the content that it names;
a checkpoint that was saved again under the name is another content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

from cxlfs.checkpoint.catalogue import OWN_PREFIX
from cxlfs.durable import opened_file, write_durably
from cxlfs.errors import NotSendableError
from cxlfs.plain import Plain, PlainError, constant, fields, parse, row, text
from cxlfs.tier.survey import survey

FORMAT = 1
RECORDS_NAME = f"{OWN_PREFIX}tier"
_BYTES_MAX = 1 << 20
_TIERS_MAX = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Drained:
    """``url``: of the checkpoint itself; ``content_id``: see ``Manifest``."""

    url: str
    content_id: str


def note(path: Path, drained: Drained) -> None:
    """Durable on return. Raises OSError."""
    place = _place(path)
    place.parent.mkdir(exist_ok=True)
    others = [each for each in _read(place) if each.url != drained.url]
    rows = [dataclasses.asdict(each) for each in (*others[-_TIERS_MAX + 1 :], drained)]
    write_durably(place, json.dumps({"format": FORMAT, "tiers": rows}, indent=1).encode() + b"\n")


def forget(path: Path) -> None:
    """Of a checkpoint that goes. Raises OSError."""
    _place(path).unlink(missing_ok=True)


def tiers_of(path: Path) -> tuple[str, ...]:
    """URLs under which what lies at ``path`` now was drained; cheap on a cxlfs mount, elsewhere all
    of it is read. Raises OSError.
    """
    found = _read(_place(path))
    if not found:
        return ()
    try:
        content_id = survey(path, judge=False).content_id
    except NotSendableError:  # being written
        return ()
    return tuple(each.url for each in found if each.content_id == content_id)


def _place(path: Path) -> Path:
    return path.parent / RECORDS_NAME / f"{path.name}.json"


def _read(place: Path) -> tuple[Drained, ...]:
    """Nothing of what is no record: it says what is elsewhere, and nothing rests on it."""
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError, NotSendableError, PlainError),
        opened_file(place, NotSendableError) as (_, size_bytes),
    ):
        if size_bytes <= _BYTES_MAX:
            found = fields(parse(place.read_bytes(), _BYTES_MAX), ("format", "tiers"))
            constant(found["format"], FORMAT)
            return row(found["tiers"], _drained, _TIERS_MAX)
    return ()


def _drained(plain: Plain) -> Drained:
    found = fields(plain, ("url", "content_id"))
    return Drained(text(found["url"]), text(found["content_id"]))
