"""What a mount says of itself, and what its store remembers: through the kernel and the daemon."""

from __future__ import annotations

import os

import pytest

from cxlfs.media.room import VOLATILE_TEXT
from cxlfs.units import MIB
from tests.support.cli import Run, run_program
from tests.support.mount import Workplace, is_in_memory, wait_until

pytestmark = pytest.mark.mounted


def test_what_a_mount_does_not_promise_is_said(run: Run, place: Workplace) -> None:
    options = "verify=off,allow_incomplete_overwrite,commit=300"
    said = run("mount", place.source, place.mountpoint, "-o", options)
    assert said.code == 0
    shown = run("status", place.mountpoint).stdout
    found = run("status", place.mountpoint, "--json").document
    assert run("umount", place.mountpoint).code == 0
    texts = [
        *([VOLATILE_TEXT] if is_in_memory(place.source) else []),
        "what is read is not compared with its checksum (verify=off)",
        "a crash while a file is overwritten loses both versions (allow_incomplete_overwrite)",
        "a crash may lose the last 300 s of a file that stays open (commit=300)",
    ]
    log = next(place.runtime.glob("*.log")).read_text()
    assert found["weakened"] == texts
    assert found["options"] == {
        "verify": "off",
        "commit_seconds": 300.0,
        "allow_incomplete_overwrite": True,
        "allow_other": False,
        "default_permissions": False,
        "units": "auto",
        "tidy": "off",
        "torn": "back",
        "dedup": "off",
    }
    for text in texts:
        assert f"warning: {text}\n" in said.stderr
        assert f"caution: {text}\n" in shown
        assert f"weaker than promised: {text}\n" in log


def test_damage_and_the_last_verify_outlive_the_mount(run: Run, place: Workplace) -> None:
    place.mount()
    (place.mountpoint / "a").write_bytes(b"right" * 1000)
    (place.mountpoint / "b").write_bytes(b"other" * 1000)
    place.unmount()
    found = run("dump", place.source, "inode", "2", "--json").document
    offset = found["versions"][0]["references"][0]["media_offset"]
    with place.source.open("r+b") as file:
        file.seek(offset)
        file.write(b"w")
    place.announced.append("check|damage|checksum")
    place.mount()
    said = run("verify", place.mountpoint, "--json")
    assert (said.code, said.documents[-1]["recorded"]) == (3, True)
    place.remount()
    assert os.getxattr(place.mountpoint / "a", "user.cxlfs.state") == b"damaged"
    assert not [name for name in os.listxattr(place.mountpoint) if "cxlfs" in name]
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(place.mountpoint, "trusted.cxlfs.health")
    with pytest.raises(OSError, match="Operation not permitted"):
        os.setxattr(place.mountpoint, "trusted.cxlfs.health", b"")
    status = run("status", place.mountpoint, "--json").document
    assert (status["state"], status["damaged_paths"]) == ("NEEDS-CHECK", ["/a"])
    assert status["last_verify"]["kinds"] == ["data-checksum"]
    (place.mountpoint / "a").write_bytes(b"again" * 1000)
    assert os.getxattr(place.mountpoint / "a", "user.cxlfs.state") == b"complete"
    place.remount()
    status = run("status", place.mountpoint, "--json").document
    assert (status["state"], status["damaged_files"]) == ("ONLINE", 0)
    assert run("verify", place.mountpoint).code == 0
    assert "clean (structures and data)" in run("status", place.mountpoint).stdout


def test_a_full_store_that_has_room_again_needs_nothing(run: Run, place: Workplace) -> None:
    place.mount()
    place.announced.append("no-space|not-published")
    (place.mountpoint / "old").write_bytes(bytes(30 * MIB))
    with pytest.raises(OSError, match="No space left"):
        (place.mountpoint / "new").write_bytes(bytes(45 * MIB))
    (place.mountpoint / "new").unlink()
    place.remount()
    status = run("status", place.mountpoint, "--json").document
    assert status["refused_writes"]["count"] >= 1
    assert "refused for want of space since" in status["status"]
    (place.mountpoint / "old").unlink()

    def needs_nothing() -> bool:
        """The kernel says when it likes that nobody knows the file any more."""
        status = run("status", place.mountpoint, "--json").document
        return (status["refused_writes"], status["status"]) == (None, None)

    wait_until(needs_nothing, "the space of the removed file is free")


def test_tidy_by_each_program_that_mounts(run: Run, place: Workplace) -> None:
    """``cxlfs mount`` and mount(8) (fstab) hand the command over that tidies."""

    def save_half() -> None:
        (place.mountpoint / "half.pt").write_bytes(b"PK\3\4 and no end")
        assert run("umount", place.mountpoint).code == 0

    place.announced.append("tidy: set aside: ")
    place.mount()
    save_half()
    said = run_program(
        place.source, place.mountpoint, "-v", "-o", "tidy=always", program="mount.cxlfs"
    )
    assert said.code == 0
    assert (
        "tidied: 1 set aside, 0 put right (files that name one); directories looked at: 1,"
        in said.stdout
    )
    assert [path.name for path in place.mountpoint.iterdir()] == [".cxlfs-aside"]
    save_half()
    found = run("mount", place.source, place.mountpoint, "-o", "tidy=always", "--json").document
    assert (found["tidied"]["state"], found["tidied"]["checkpoints"]) == ("done", 1)
    assert run("status", place.mountpoint, "--json").document["tidied"] == found["tidied"]
    assert "tidied: 1 set aside" in run("status", place.mountpoint).stdout
    assert run("umount", place.mountpoint).code == 0
