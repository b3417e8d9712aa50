"""Verifying behind a mount: the daemon does it, and serves files meanwhile."""

from __future__ import annotations

import os

import pytest

from cxlfs.control.client import control_request
from cxlfs.errors import CxlfsError, UsageError
from cxlfs.verify import PASSES, Finding, finding_from_dict, progress_from_dict
from tests.support.mount import MIB, Workplace, wait_for_line

WRITER = """
import os, sys
print("ready", flush=True)
number = 0
while True:
    number += 1
    path = os.path.join(sys.argv[1], f"file-{number % 7}")
    with open(path + ".tmp", "wb") as file:
        for _ in range(number % 5):
            file.write(os.urandom(100_000))
    os.replace(path + ".tmp", path)
    if number % 3 == 0:
        os.unlink(path)
"""


def _verify(place: Workplace, **parameters: object) -> tuple[list[Finding], set[int]]:
    """Findings, and the passes that ran to their end."""
    findings, ended = [], set()
    for message in control_request(str(place.mountpoint), "verify", parameters):
        if message["message_type"] == "finding":
            findings.append(finding_from_dict(message))
        elif message["message_type"] == "recorded":
            assert message["reason"] is None
        else:
            progress = progress_from_dict(message)
            if progress.finished:
                assert progress.skipped is None
                ended.add(progress.pass_id)
    return findings, ended


def test_clean_while_files_are_written(place: Workplace) -> None:
    for number in range(4):
        (place.mountpoint / f"large-{number}").write_bytes(os.urandom(4 * MIB))
    writer = place.python(WRITER, place.mountpoint)
    wait_for_line(writer)
    for _ in range(5):
        findings, ended = _verify(place)
        assert findings == []
        assert ended == {each.id for each in PASSES}
    assert writer.poll() is None, "the writer works on"


def test_structure_only(place: Workplace) -> None:
    findings, ended = _verify(place, structure_only=True)
    assert findings == []
    assert ended == {each.id for each in PASSES if not each.data}


def test_damaged_data_is_named_and_remembered(place: Workplace) -> None:
    place.announced.append("checksum|damage")
    place.ends_clean = False
    path = place.mountpoint / "directory" / "checkpoint"
    path.parent.mkdir()
    data = os.urandom(MIB)
    path.write_bytes(data)
    content = place.source.read_bytes()
    where = content.index(data[200_000:200_032])
    with place.source.open("r+b") as file:
        file.seek(where)
        file.write(bytes([content[where] ^ 8]))
    (finding,), _ = _verify(place)
    assert finding.id == "data-checksum"
    assert finding.path == b"/directory/checkpoint"
    assert finding.ino == path.stat().st_ino
    (use,) = finding.uses
    assert use.file_offset <= 200_000 < use.file_offset + use.length
    assert os.getxattr(path, "user.cxlfs.state") == b"damaged"
    path.write_bytes(data)
    assert _verify(place)[0] == []


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_wrong_parameters(place: Workplace, value: object) -> None:
    with pytest.raises(UsageError):
        _verify(place, structure_only=value)


@pytest.mark.large_store
def test_unmounting_in_mid_run_is_an_error_of_that_run_alone(place: Workplace) -> None:
    for number in range(8):
        (place.mountpoint / f"large-{number}").write_bytes(os.urandom(8 * MIB))
    messages = control_request(str(place.mountpoint), "verify")
    next(messages)
    place.unmount()
    try:
        kinds = {message["message_type"] for message in messages}
        assert kinds <= {"progress", "recorded"}, "it was faster than the unmount"
    except CxlfsError as error:
        assert "closed" in error.message or "daemon" in error.message  # noqa: PT017
