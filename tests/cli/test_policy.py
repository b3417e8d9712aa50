"""``cxlfs policy``: what is said of directories holds, and outlives the mount."""

from __future__ import annotations

from tests.support.cli import Run
from tests.support.mount import Workplace, kill, wait_for_line

MARKER = "trainer_state.json"
SAVE = """
import os, sys
os.mkdir(sys.argv[1])
open(sys.argv[1] + "/shard", "w").close()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_policies(run: Run, place: Workplace) -> None:
    place.announced.append(r"unit-back: what was there before is back")
    place.mount()
    runs = place.mountpoint / "runs"
    runs.mkdir()
    said = run("policy", "set", runs, "--unit", "epoch-*", "--done", MARKER, "--quiet", "7")
    assert (said.code, said.stderr) == (0, "")
    expected = {
        "path": "/runs",
        "unit": ["epoch-*"],
        "done": [MARKER],
        "quiet_seconds": 7.0,
    }
    place.remount()
    assert run("policy", "show", runs, "--json").document["policies"] == [expected]
    assert run("policy", "--json", "show", runs).document["policies"] == [expected]
    process = place.python(SAVE, runs / "epoch-1")
    wait_for_line(process)
    assert [path.name for path in runs.iterdir()] == ["epoch-1"]
    kill(process)
    assert list(runs.iterdir()) == []
    assert run("policy", "unset", runs).stdout == "no policies\n"
    for arguments, code in (
        (("set", runs, "--unit", "a/b"), 2),
        (("set", runs, "--unit", "a", "--quiet", "-1"), 2),
        (("set", runs / "none", "--unit", "a"), 1),
        (("show", "/"), 2),
    ):
        assert run("policy", *arguments).code == code, arguments
