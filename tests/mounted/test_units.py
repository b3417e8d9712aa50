"""Checkpoint units through a mount: savers that are killed, that end, and whoever looks next."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cxlfs.control.client import control_request
from tests.support.cli import Run, make_run, run_program
from tests.support.mount import Workplace, kill, tell, wait_for_line, wait_until

BACK = r"unit-back: what was there before is back"
MARKER = "trainer_state.json"

SAVE = """
import os, sys
directory, version, files, marker, pause_after = sys.argv[1:6]
os.makedirs(directory, exist_ok=True)
for number in range(int(files)):
    if str(number) == pause_after:
        print("ready", flush=True)
        sys.stdin.readline()
    with open(f"{directory}/shard-{number}", "wb") as file:
        file.write((version + " ").encode() * 60_000)
if marker:
    with open(f"{directory}/{marker}", "w") as file:
        file.write(version)
if pause_after == "end":
    print("ready", flush=True)
    sys.stdin.readline()
raise SystemExit(int(sys.argv[6]))
"""


def saver(
    place: Workplace,
    directory: Path,
    version: int,
    *,
    pause_after: object = "never",
    marker: str = MARKER,
    code: int = 0,
) -> subprocess.Popen[bytes]:
    return place.python(SAVE, directory, version, 4, marker, pause_after, code)


def save(place: Workplace, directory: Path, version: int, *, marker: str = MARKER) -> None:
    assert saver(place, directory, version, marker=marker).wait(30) == 0


def becomes(directory: Path, wanted: set[str]) -> None:
    """Until by name, too, there is nothing but that: the kernel hears of it a moment later."""

    def is_so() -> bool:
        try:
            return versions(directory) == wanted
        except FileNotFoundError:
            return False

    wait_until(is_so, f"{wanted} is there")


def one_version(directory: Path) -> str:
    """Which one is there, once nothing changes any more."""
    found: set[str] = set()

    def is_one() -> bool:
        try:
            found.clear()
            found.update(versions(directory))
        except FileNotFoundError:
            return False
        return len(found) == 1 and "" not in found

    wait_until(is_one, "one version is there")
    return found.pop()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def versions(directory: Path) -> set[str]:
    """Of all files in a directory, as whoever opens them by name finds them."""
    found = set()
    for path in directory.iterdir():
        text = path.read_text()
        found.add(text.split()[0] if text else "")
    return found


@pytest.fixture
def place(unmounted: Workplace) -> Workplace:
    unmounted.announced += [BACK, r"reverted: the previous version is back"]
    return unmounted


@pytest.fixture(params=["native", "pyfuse3"])
def mounted(place: Workplace, request: pytest.FixtureRequest) -> Path:
    """With well-known names."""
    return place.mount(f"units=auto,transport={request.param}")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return make_run(capfd)


def test_a_saver_killed_between_two_files(place: Workplace, mounted: Path, run: Run) -> None:
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    process = saver(place, directory, 2, pause_after=2)
    wait_for_line(process)
    assert versions(directory) == {"1", "2"}  # POSIX: what was written is seen
    kill(process)
    assert names(mounted) == ["checkpoint-1"]
    becomes(directory, {"1"})
    history = run("history", directory / "shard-0", "--json").document["versions"]
    assert len(history) >= 2, "what was written is there"
    save(place, directory, 3)
    assert versions(directory) == {"3"}


def test_a_new_directory_is_not_listed_after_the_kill(
    place: Workplace, mounted: Path, run: Run
) -> None:
    """Whoever restarts at once and takes the newest directory finds the one before."""
    save(place, mounted / "checkpoint-1", 1)
    process = saver(place, mounted / "checkpoint-2", 2, pause_after=3)
    wait_for_line(process)
    kill(process)
    assert names(mounted) == ["checkpoint-1"]
    wait_until(lambda: not (mounted / "checkpoint-2").exists(), "the name is gone")
    run("undelete", mounted / "checkpoint-2")
    assert versions(mounted / "checkpoint-2") == {"2"}


def test_whoever_opens_by_name_after_the_kill(place: Workplace, mounted: Path) -> None:
    """Without a listing before, and by names that the kernel remembers: as frameworks do that
    overwrite one directory, and begin again at once.
    """
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    for number in range(4):
        process = saver(place, directory, 2, pause_after=3)
        wait_for_line(process)
        assert [(directory / f"shard-{n}").read_text()[0] for n in range(4)] == [*"2221"]
        kill(process)
        first = f"shard-{number}" if number < 3 else MARKER
        assert (directory / first).read_text()[0] == "1"
        assert versions(directory) == {"1"}


MORE = """
import os, sys
top = sys.argv[1]
with open(top + "/shard-0", "w") as file:
    file.write("2")
os.mkdir(top + "/more")
with open(top + "/more/file", "w") as file:
    file.write("2")
print("ready", flush=True)
sys.stdin.readline()
"""


def test_whoever_lists_the_unit_itself_after_the_kill(place: Workplace, mounted: Path) -> None:
    """By a name that the kernel remembers: it led to what has gone back, with a new file in it."""
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    for _ in range(4):
        process = place.python(MORE, directory)
        wait_for_line(process)
        assert "more" in names(directory)
        kill(process)
        assert "more" not in names(directory)
        assert versions(directory) == {"1"}


def test_whoever_asks_for_a_new_name_after_the_kill(place: Workplace, mounted: Path) -> None:
    """The kernel knows the directory, and not what is in it."""
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    process = saver(place, directory, 2, pause_after=3)
    wait_for_line(process)
    kill(process)
    assert not (directory / "of-no-version").exists()
    assert (directory / "shard-0").read_text()[0] == "1"


@pytest.mark.parametrize("code", [0, 1])
def test_how_a_saver_without_a_marker_ends(place: Workplace, mounted: Path, code: int) -> None:
    directory = mounted / "checkpoint_1"
    save(place, directory, 1, marker="")
    wait_until(lambda: not _open_units(place), "the first one is done")
    process = saver(place, directory, 2, marker="", code=code)
    assert process.wait(30) == code
    becomes(directory, {"2"} if code == 0 else {"1"})


def _open_units(place: Workplace) -> bool:
    """What ``cxlfs list`` says."""
    entries = control_request(str(place.source), "list", {"path": "/"})
    return any(entry["being_written"] for entry in entries if "being_written" in entry)


def test_several_savers_of_which_one_is_killed(place: Workplace, mounted: Path) -> None:
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    first = saver(place, directory, 2, pause_after=1, marker="")
    wait_for_line(first)
    second = saver(place, directory, 2, pause_after=3, marker="")
    wait_for_line(second)
    kill(first)
    time.sleep(1.2)  # longer than the pauses of background work: it would have gone back by now
    assert versions(directory) == {"1", "2"}, "one of the savers goes on"
    kill(second)
    becomes(directory, {"1"})


def test_kills_at_random_instants(place: Workplace, mounted: Path, rng: random.Random) -> None:
    """Never old and new ones mixed, whoever looks next."""
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    last, kills, longest = 1, 0, 0.01
    for version in range(2, 50):
        process = saver(place, directory, version, pause_after=0)
        wait_for_line(process)
        tell(process)
        time.sleep(rng.random() * longest)
        process.send_signal(signal.SIGKILL)
        killed = process.wait(30) != 0
        names(mounted)
        found = one_version(directory)
        assert found in {str(last), str(version)}
        assert killed or found == str(version)
        if found == str(last):
            kills += 1
        else:  # on a busy machine the saver was quicker: earlier then
            longest *= 0.8
        last = int(found)
        if version >= 13 and kills >= 3:
            break
    assert kills >= 3, "hardly a kill hit a save: this shows nothing"


def test_a_kill_of_the_daemon(place: Workplace, mounted: Path) -> None:
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    process = saver(place, directory, 2, pause_after=2)
    wait_for_line(process)
    place.kill_daemon()
    kill(process)
    place.mount()
    assert versions(directory) == {"1"}


def test_mounting_after_a_crash_names_what_was_open(place: Workplace, mounted: Path) -> None:
    """A read-only mount shows it mixed and says so; the next one rolls it back."""
    place.announced.append("not closed cleanly|recover|dead mount")
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    process = saver(place, directory, 2, pause_after=2)
    wait_for_line(process)
    place.kill_daemon()
    kill(process)
    said = run_program("mount", place.source, place.mountpoint, "--read-only")
    assert "after an unclean end; unfinished, may be mixed: /checkpoint-1\n" in said.stdout
    assert versions(directory) == {"1", "2"}
    assert "; left unfinished: /checkpoint-1\n" in run_program("status", place.mountpoint).stdout
    assert run_program("umount", place.mountpoint).code == 0
    said = run_program("mount", place.source, place.mountpoint)
    assert "after an unclean end; rolled back: /checkpoint-1\n" in said.stdout
    assert versions(directory) == {"1"}


def test_unmounting_in_mid_save(place: Workplace, mounted: Path) -> None:
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    process = saver(place, directory, 2, pause_after=2)
    wait_for_line(process)
    place.remount()
    assert versions(directory) == {"1"}
    kill(process)


def test_changes_in_place_go_back_together(place: Workplace, mounted: Path) -> None:
    """Written through a shared mapping and by pwrite, as memory maps and HDF5 do."""
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    process = place.python(
        """
import mmap, os, sys
with open(sys.argv[1] + "/shard-0", "r+b") as file:
    with mmap.mmap(file.fileno(), 0) as view:
        view[:5] = b"9 9 9"
        view.flush()
fd = os.open(sys.argv[1] + "/shard-1", os.O_RDWR)
os.pwrite(fd, b"9 9 9", 0)
os.fsync(fd)
os.close(fd)
print("ready", flush=True)
sys.stdin.readline()
""",
        directory,
    )
    wait_for_line(process)
    assert versions(directory) == {"1", "9"}
    kill(process)
    names(mounted)
    becomes(directory, {"1"})


def test_a_removed_tree_leaves_nothing(place: Workplace, mounted: Path) -> None:
    """Once the program that removed it has ended well."""
    save(place, mounted / "checkpoint-1", 1)
    remover = place.python(
        "import shutil, sys; shutil.rmtree(sys.argv[1])", mounted / "checkpoint-1"
    )
    assert remover.wait(timeout=60) == 0
    assert names(mounted) == []
    wait_until(lambda: not _open_units(place), "the copy is gone")


REPLACE = """
import os, shutil, sys
directory, step = sys.argv[1:]
shutil.rmtree(directory)
assert not os.path.exists(directory)
if step == "made":
    os.mkdir(directory)
    with open(directory + "/shard-0", "w") as file:
        file.write("2 " * 60_000)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("step", ["removed", "made"])
def test_a_saver_that_replaces_its_directory_is_killed(
    place: Workplace, mounted: Path, step: str
) -> None:
    """As zarr does with mode="w": whoever opens by name finds the old set at once, without a
    listing before, although the kernel has just been told that there is none.
    """
    place.announced.append(r"unit-back: what was removed is back")
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    for number in range(3):
        process = place.python(REPLACE, directory, step)
        wait_for_line(process)
        assert directory.exists() == (step == "made")
        assert not (directory / MARKER).exists()
        kill(process)
        assert (directory / f"shard-{number}").read_text()[0] == "1"
        assert versions(directory) == {"1"}
    assert not _open_units(place)


def test_a_removed_directory_is_back_when_the_daemon_was_killed(
    place: Workplace, mounted: Path
) -> None:
    place.announced.append(r"unit-back: what was removed is back")
    directory = mounted / "checkpoint-1"
    save(place, directory, 1)
    process = place.python(REPLACE, directory, "removed")
    wait_for_line(process)
    place.kill_daemon()
    kill(process)
    place.mount()
    assert versions(directory) == {"1"}


SAVE_ONE = """
import os, signal, sys
path, how = sys.argv[1:]
with open(path, "w") as file:
    file.write("2 " * 600_000)
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "exception":
        raise RuntimeError("in mid-save")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    file.write("2 " * 600_000)
if how == "kill-behind":
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(how == "fail-behind")
"""


@pytest.mark.parametrize(
    ("how", "there"),
    [
        ("interrupt", 1),
        ("exception", 1),
        ("kill", 1),
        ("fail-behind", 1),
        ("kill-behind", 2),
        ("end", 2),
    ],
)
def test_each_file_is_a_checkpoint(place: Workplace, mounted: Path, how: str, there: int) -> None:
    """What with open(...) closes while an exception goes through it is no checkpoint."""
    directory = mounted / "runs"
    directory.mkdir()
    said = run_program("policy", "set", directory, "--unit", ".", "--done", "*")
    assert said.code == 0, said.stderr
    path = directory / "model"
    path.write_text("1 " * 600_000)
    process = place.python(SAVE_ONE, path, how, stderr=subprocess.DEVNULL)
    process.wait(30)
    assert path.read_text() == f"{there} " * (600_000 * there)


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def test_a_shell_removes_for_good(place: Workplace, mounted: Path) -> None:
    """Within a moment its room is free, and no kill of the daemon brings anything back."""
    directory = mounted / "checkpoint-1"
    free_before = free_bytes(mounted)
    save(place, directory, 1)
    (directory / "shard-0").write_bytes(b"b" * 8_000_000)
    (directory / MARKER).write_text("1")
    assert subprocess.run(["rm", "-rf", directory], check=False).returncode == 0
    assert names(mounted) == []
    wait_until(lambda: not _open_units(place), "the copy is gone")
    wait_until(lambda: free_bytes(mounted) > free_before - 4_000_000, "its room is free")
    place.kill_daemon()
    place.mount()
    assert names(mounted) == []
