"""The table of passes, and running them.

Never here: what a pass looks at (its module), printing, repairing (``repair``).

Invariants
- The number of a pass is permanent; the order may change.
- A pass runs only when those that it needs have found what it builds upon; else it is skipped and
  says so, and the findings of the others stand.
- Nothing is written to the media, and damage never raises: it is a finding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from cxlfs.media import Media
from cxlfs.store import Store
from cxlfs.verify.context import Context, Steps
from cxlfs.verify.data_pass import check_data
from cxlfs.verify.extent_passes import check_extents, check_references
from cxlfs.verify.findings import Finding, Progress
from cxlfs.verify.image_pass import check_images
from cxlfs.verify.journal_pass import check_journal
from cxlfs.verify.media_passes import check_roots, check_segment_headers, check_superblock
from cxlfs.verify.namespace_pass import check_namespace
from cxlfs.verify.space_pass import check_space
from cxlfs.verify.state_pass import check_state


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """``text`` explains it in progress and documentation. ``needs``: what must be known before it:
    ``superblock``, ``root``, ``columns`` (a state, of the store or of an image alone) or ``store``
    (one that opens). ``data``: it reads file data; the others check structure.
    """

    id: int
    name: str
    text: str
    needs: str | None
    run: Callable[[Context], Steps]
    data: bool = False


PASSES = (
    Pass(
        1,
        "superblock",
        "The four superblock copies are good and equal.",
        None,
        check_superblock,
    ),
    Pass(
        2,
        "roots",
        "Both root rings hold the last roots, equal in both.",
        "superblock",
        check_roots,
    ),
    Pass(
        3,
        "segments",
        "Every segment in use has a header that says what it is used for.",
        "root",
        check_segment_headers,
    ),
    Pass(
        4,
        "journal",
        "Every record is good in both copies, makes sense, and none is missing.",
        "root",
        check_journal,
    ),
    Pass(
        5,
        "image",
        "The checksums of the newest metadata image and of the fallback are right.",
        "root",
        check_images,
    ),
    Pass(
        6,
        "state",
        "The store opens, and nothing that was committed is missing.",
        "root",
        check_state,
    ),
    Pass(
        7,
        "extents",
        "Extents lie in data segments and share no byte.",
        "columns",
        check_extents,
    ),
    Pass(
        8,
        "namespace",
        "Names are possible and lead from the root directory to every inode, without loops.",
        "columns",
        check_namespace,
    ),
    Pass(
        9,
        "references",
        "Every piece of a file lies inside an extent and inside the file.",
        "columns",
        check_references,
    ),
    Pass(
        10,
        "space",
        "Segments count as free exactly when nothing in use lies in them.",
        "store",
        check_space,
    ),
    Pass(
        11,
        "data",
        "Every chunk of file data matches its checksum.",
        "store",
        check_data,
        data=True,
    ),
)
"""In the order in which they run."""


def run_passes(
    media: Media,
    *,
    structure_only: bool,
    store: Store | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Finding]:
    """Verify a store and yield what is found, in the order of the passes.

    ``media`` may be open read-only and must not be written by another process; ``store``: the
    mounted store on it, inside its daemon. ``progress`` is called after every slice.

    Raises MediaError when the store is closed in mid-run, OutOfMemoryError.
    """
    for step in run_steps(media, structure_only=structure_only, store=store):
        if isinstance(step, Finding):
            yield step
        elif progress is not None:
            progress(step)


def run_steps(
    media: Media, *, structure_only: bool, store: Store | None = None
) -> Iterator[Finding | Progress]:
    """As :func:`run_passes`, with the progress in between: the caller may serve others after each
    step, and the store may change then.
    """
    context = Context(media, store)
    try:
        for each in PASSES:
            if not (structure_only and each.data):
                yield from _run(each, context)
    finally:
        context.close()


def _run(each: Pass, context: Context) -> Iterator[Finding | Progress]:
    done, total, unit = 0, 0, "items"
    missing = _missing(each.needs, context)
    if missing is None:
        for step in each.run(context):
            if isinstance(step, Finding):
                yield step
            else:
                done, total, unit = step.done, max(step.total, step.done), step.unit
                yield Progress(pass_id=each.id, name=each.name, done=done, total=total, unit=unit)
    yield Progress(
        pass_id=each.id,
        name=each.name,
        done=done,
        total=total,
        unit=unit,
        finished=True,
        skipped=missing,
    )
    context.require_open()


def _missing(needs: str | None, context: Context) -> str | None:
    if needs in ("superblock", "root", "store", "columns") and context.superblock is None:
        return "there is no superblock"
    if needs in ("root", "store", "columns") and context.newest is None:
        return "there is no root"
    if needs == "store" and context.store() is None:
        return "the store cannot be opened"
    if needs == "columns" and context.columns() is None:
        return "there is no image"
    return None
