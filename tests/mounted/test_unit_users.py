"""Checkpoint units on a mount without options: logs that are open, other users, the place aside."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.mount import Workplace, kill, tell, wait_for_line, wait_until

BACK = r"unit-back: what was there before is back"
ALICE, BOB = 1000, 1001

AS_USER = """
import os, sys, time
os.chdir(sys.argv[1])
os.setgroups([]); os.setresgid(*3 * [int(sys.argv[2])]); os.setresuid(*3 * [int(sys.argv[2])])
os.umask(0o022)
def ready():
    print("ready", flush=True)
    sys.stdin.readline()
def write(path, text, sync=False):
    with open(path, "w") as file:
        file.write(text * 3000)
        if sync:
            file.flush()
            os.fsync(file.fileno())
"""

LAYOUTS = {
    "trainer": """
def save(step, half=False):
    directory = f"checkpoint-{step}"
    os.makedirs(directory, exist_ok=True)
    for name in ["model.safetensors", "optimizer.pt", "trainer_state.json"][: 2 if half else 3]:
        write(f"{directory}/{name}", str(step))
""",
    "dcp": """
def save(step, half=False):
    for name in ["__0_0.distcp", "__0_1.distcp"][: 1 if half else 2]:
        write(name, str(step), sync=True)
    if not half:
        write(".metadata.tmp", str(step), sync=True)
        os.rename(".metadata.tmp", ".metadata")
""",
    "sharded": """
def save(step, half=False):
    for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]:
        write(name, str(step))
        if half:
            return
    write("model.safetensors.index.json", str(step))
""",
}
TRAIN = """
log = open("events.out.tfevents.1", "wb", buffering=0)
text = open("progress", "a")
save(1)
log.write(b"behind 1;")
text.write("behind 1;"); text.flush()
if sys.argv[3] == "half":
    save(2, half=True)
else:
    save(2)
log.write(b"behind 2;")
text.write("behind 2;"); text.flush()
ready()
"""
LOGS = {"events.out.tfevents.1": "behind 1;behind 2;", "progress": "behind 1;behind 2;"}


@pytest.fixture
def place(unmounted: Workplace) -> Workplace:
    unmounted.announced += [BACK, r"reverted: the previous version is back", "aside-refused"]
    return unmounted


@pytest.fixture(params=["native", "pyfuse3"])
def mounted(place: Workplace, request: pytest.FixtureRequest) -> Path:
    """For everybody, and without any word on units."""
    top = place.mount(f"allow_other,transport={request.param}")
    top.chmod(0o1777)
    return top


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def versions(directory: Path) -> dict[str, str]:
    """Of all files below a directory but the logs: which save they are of."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(directory)): path.read_text()[0]
        for path in files
        if path.name not in LOGS
    }


@pytest.mark.parametrize("when", ["half", "finished"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainer_with_logs_open_is_killed(
    place: Workplace, mounted: Path, layout: str, when: str
) -> None:
    """In mid-save: what there was before is back, and the logs have all their lines. Behind a
    finished save: nothing is taken back.
    """
    directory = mounted / "run"
    directory.mkdir()
    os.chown(directory, ALICE, ALICE)
    process = place.python(AS_USER + LAYOUTS[layout] + TRAIN, directory, ALICE, when)
    wait_for_line(process)
    kill(process)
    listed = names(directory)
    if layout == "trainer":
        steps = ["checkpoint-1"] if when == "half" else ["checkpoint-1", "checkpoint-2"]
        wait_until(lambda: sorted(names(directory) - set(LOGS)) == steps, "it is so")
        wanted = {step: step[-1] for step in steps}
    else:
        wanted = dict.fromkeys(listed - set(LOGS), "1" if when == "half" else "2")
    found = {path.split("/")[0]: version for path, version in versions(directory).items()}
    assert found == wanted
    assert {name: (directory / name).read_text() for name in LOGS} == LOGS


def test_a_log_goes_on_in_the_directory_that_is_back(place: Workplace, mounted: Path) -> None:
    """Its writer lives, and has it open all the time."""
    directory = mounted / "run"
    directory.mkdir()
    os.chown(directory, ALICE, ALICE)
    logger = place.python(
        AS_USER
        + """
log = open("progress", "ab", buffering=0)
log.write(b"1;")
ready()
log.write(b"2;")
ready()
""",
        directory,
        ALICE,
    )
    wait_for_line(logger)
    saver = place.python(
        AS_USER + LAYOUTS["dcp"] + "save(1); save(2, half=True); ready()", directory, ALICE
    )
    wait_for_line(saver)
    kill(saver)
    assert set(versions(directory).values()) == {"1"}
    tell(logger)
    wait_for_line(logger)
    wait_until(lambda: (directory / "progress").read_text() == "1;2;", "the lines are there")
    kill(logger)


def test_a_user_saves_beside_the_files_of_another(place: Workplace, mounted: Path) -> None:
    """The kill of one takes nothing of the other back, in a directory of a file's name, too."""
    shared = mounted / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    bob = place.python(AS_USER + 'write("__0_0.distcp", "b"); ready()', shared, BOB)
    wait_for_line(bob)
    alice = place.python(
        AS_USER + 'os.mkdir("alice", 0o700); write("alice/model.pt", "a", sync=True)', shared, ALICE
    )
    assert alice.wait(30) == 0
    kill(bob)
    assert names(shared) == {"__0_0.distcp", "alice"}
    own = mounted / "checkpoint-1"
    bob = place.python(
        AS_USER + 'os.mkdir("checkpoint-1"); os.chmod("checkpoint-1", 0o777)\n'
        'write("checkpoint-1/shard", "b"); ready()',
        mounted,
        BOB,
    )
    wait_for_line(bob)
    alice = place.python(AS_USER + 'write("model.pt", "a", sync=True)', own, ALICE)
    assert alice.wait(30) == 0
    kill(bob)
    wait_until(lambda: versions(own) == {"model.pt": "a"}, "alice's file alone is there")


def test_nobody_looks_into_what_is_kept_of_others(place: Workplace, mounted: Path) -> None:
    """Nor makes the place, nor puts anything there, root neither."""
    code = AS_USER + "os.mkdir('.cxlfs-sets', 0o755)"
    assert place.python(code, mounted, BOB).wait(30) != 0
    directory = mounted / "checkpoint-1"
    saver = place.python(
        AS_USER
        + """
os.mkdir("checkpoint-1", 0o700)
os.chdir("checkpoint-1")
write("a", "1"); write("trainer_state.json", "1"); write("a", "2"); ready()
""",
        mounted,
        ALICE,
    )
    wait_for_line(saver)
    code = AS_USER + "\nfor n in os.listdir('.cxlfs-sets'): pass"
    assert place.python(code, mounted, BOB).wait(30) != 0
    aside = mounted / ".cxlfs-sets"
    for verb in (
        aside.stat,
        lambda: list(aside.iterdir()),
        aside.mkdir,
        (aside / "deeper").mkdir,
        lambda: aside.write_text("x"),
        lambda: aside.rename(mounted / "away"),
        lambda: (directory / "a").rename(aside),
    ):
        with pytest.raises(OSError) as raised:
            verb()  # type: ignore[operator]
        assert raised.value.errno in {errno.EPERM, errno.ENOENT}
    assert names(mounted) == {"checkpoint-1"}
    kill(saver)
    assert set(versions(directory).values()) == {"1"}
    (mounted / "another").write_text("the mount can be written")
    place.remount()
    assert (mounted / "another").exists()


def test_a_saver_lives_when_its_store_is_unmounted(place: Workplace, mounted: Path) -> None:
    """Half a save without a file that comes last."""
    directory = mounted / "checkpoint_1"
    code = 'os.mkdir("checkpoint_1"); os.chdir("checkpoint_1"); write("a", "1"); write("b", "1")'
    saver = place.python(AS_USER + code, mounted, 0)
    assert saver.wait(30) == 0
    assert versions(directory) == {"a": "1", "b": "1"}
    saver = place.python(
        AS_USER + 'write("checkpoint_1/a", "2"); os.chdir("/"); ready()', mounted, 0
    )
    wait_for_line(saver)
    assert versions(directory) == {"a": "2", "b": "1"}
    place.remount()
    assert versions(directory) == {"a": "1", "b": "1"}
    kill(saver)
