"""The control request ``verify``: check the mounted store in slices, between other requests.

Parameters: ``structure_only`` (true or false). The answer: ``progress`` messages (the fields of
``verify.Progress``) and ``finding`` messages (those of ``verify.Finding``) as they come, and last
``recorded``: whether the store remembers the outcome, and if not, why.

Never here: the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cxlfs.daemon.callers import Caller
from cxlfs.daemon.control_server import Message
from cxlfs.errors import CxlfsError, UsageError
from cxlfs.store import Store
from cxlfs.verify import Finding, finding_to_dict, progress_to_dict, run_steps
from cxlfs.verify.record import Recorder


def verify(store: Store, parameters: Mapping[str, object], _caller: Caller) -> Iterator[Message]:
    """Ends with MediaError when the store is unmounted in mid-run."""
    structure_only = parameters.get("structure_only", False)
    if not isinstance(structure_only, bool):
        raise UsageError("verify: structure_only must be true or false")
    recorder = Recorder(store)
    for step in run_steps(store.media, structure_only=structure_only, store=store):
        recorder.take(step)
        if isinstance(step, Finding):
            yield {"message_type": "finding", **finding_to_dict(step)}
        else:
            yield {"message_type": "progress", **progress_to_dict(step)}
    yield {"message_type": "recorded", "reason": _record(recorder, store)}


def _record(recorder: Recorder, store: Store) -> str | None:
    """Why the outcome could not be written down; None: it is."""
    try:
        recorder.finish(store)
    except CxlfsError as error:
        return error.message
    return None
