"""Pass 6: image and journal together make a state: the store opens, and nothing is missing.

Never here: why (passes 2 to 5 name what is damaged).
"""

from __future__ import annotations

from cxlfs.errors import CorruptionError, MediaError
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import make

_UNUSABLE_ROOT = "cannot be used"


def check_state(context: Context) -> Steps:
    """Opens the store read-only, unless it is mounted."""
    store = context.store()
    if store is None:
        error = context.open_error
        if error is not None:
            structure, place = None, None
            if isinstance(error, CorruptionError):
                structure, place = error.structure, error.media_offset
            elif isinstance(error, MediaError):
                place = error.offset
            message = f"it cannot be opened: {error.message}"
            yield make("store-unusable", message, structure=structure, media_offset=place)
        return
    if store.recovery.lost is not None:
        yield make("store-incomplete", store.recovery.lost)
    elif context.live and not store.options.read_only and store.read_only_reason is not None:
        yield make("store-incomplete", f"it stopped writing: {store.read_only_reason}")
    elif not context.live:
        for problem in store.recovery.problems:
            if _UNUSABLE_ROOT in problem:
                yield make("root-unusable", problem)
    yield Amount(1, 1)
