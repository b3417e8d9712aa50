"""``cxlfs verify`` and ``fsck.cxlfs``: what they say and return."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cxlfs.cli import verify
from cxlfs.cli.verify import NOT_MOUNTED
from cxlfs.control import mountinfo
from cxlfs.media import open_media
from cxlfs.store import Store
from cxlfs.units import MIB
from cxlfs.verify import PASSES
from tests.support.cli import Run, Said, assert_two_lines, run_program
from tests.support.mount import why_not_mountable, workplace

SECOND_COPY = 2 * MIB
STRUCTURE_PASSES = [each for each in PASSES if not each.data]


@pytest.fixture
def filled(source: Path) -> Path:
    media = open_media(source)
    store = Store.open(media)
    run1 = store.make_directory(1, b"run1", 0o755, 0, 0).ino
    attributes, handle = store.create(run1, b"a.pt", 0o644, 0, 0, os.O_WRONLY)
    assert attributes.ino == 3
    store.write(handle, 0, bytes(range(256)) * 1000)
    store.flush(handle, writer_killed=False)
    store.release(handle)
    store.close()
    media.close()
    return source


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def damage_data(run: Run, path: Path) -> int:
    """Flip a bit of ``/run1/a.pt``; returns the media offset of the chunk it lies in."""
    found = run("dump", path, "inode", "3", "--json").document
    offset: int = found["versions"][0]["references"][0]["media_offset"]
    flip(path, offset + 100)
    return offset


def of_type(said: Said, message_type: str) -> list[dict[str, object]]:
    return [found for found in said.documents if found["message_type"] == message_type]


def test_a_clean_store(run: Run, filled: Path) -> None:
    said = run("verify", filled)
    assert (said.code, said.stderr) == (0, "")
    *passes, summary, recorded = said.stdout.splitlines()
    assert recorded.startswith("not recorded in the store: it is not mounted, and was only read (")
    assert [line.split()[:2] for line in passes] == [[str(p.id), p.name] for p in PASSES]
    assert all(line.endswith("  ok") for line in passes)
    assert summary.startswith("clean: structures and data checked in ")


def test_structure_only_reads_no_data(run: Run, filled: Path) -> None:
    damage_data(run, filled)
    said = run("verify", filled, "--structure-only")
    assert said.code == 0
    assert len(said.stdout.splitlines()) == len(STRUCTURE_PASSES) + 2
    assert "clean: structures checked in " in said.stdout


def test_json_of_a_clean_store(run: Run, filled: Path) -> None:
    said = run("verify", filled, "--json")
    assert said.code == 0
    assert {found["schema"] for found in said.documents} <= {"cxlfs.verify/1", "cxlfs.progress/1"}
    passes = of_type(said, "pass")
    assert [found["pass_id"] for found in passes] == [each.id for each in PASSES]
    assert passes[-1] == {
        "schema": "cxlfs.verify/1",
        "message_type": "pass",
        "pass_id": 11,
        "name": "data",
        "done": passes[-1]["done"],
        "unit": "bytes",
        "findings": 0,
        "skipped": None,
    }
    assert passes[-1]["done"] == 256_000
    summary = said.documents[-1]
    assert isinstance(summary.pop("seconds"), float)
    assert summary == {
        "schema": "cxlfs.verify/1",
        "message_type": "summary",
        "structure_only": False,
        "passes": len(PASSES),
        "passes_skipped": 0,
        "findings": 0,
        "errors": 0,
        "warnings": 0,
        "repairable": 0,
        "repairs": 0,
        "remaining": 0,
        "saved_copy": None,
        "recorded": False,
        "not_recorded": NOT_MOUNTED,
        "next_step": None,
    }


def test_damaged_data_is_named(run: Run, filled: Path) -> None:
    offset = damage_data(run, filled)
    before = filled.read_bytes()
    said = run("verify", filled, "--json")
    assert said.code == 3
    (finding,) = of_type(said, "finding")
    assert isinstance(finding.pop("message"), str)
    expected, actual = finding.pop("expected"), finding.pop("actual")
    assert isinstance(expected, int)
    assert isinstance(actual, int)
    assert expected != actual
    assert finding == {
        "schema": "cxlfs.verify/1",
        "message_type": "finding",
        "id": "data-checksum",
        "pass_id": 11,
        "severity": "error",
        "structure": "file data",
        "media_offset": offset,
        "ino": 3,
        "path": "/run1/a.pt",
        "repairable": False,
        "next_step": "restore the file from another copy, or delete it",
        "uses": [
            {
                "ino": 3,
                "path": "/run1/a.pt",
                "file_offset": 0,
                "length": 65536,
                "version": "committed",
            }
        ],
    }
    assert said.documents[-1]["next_step"] == finding["next_step"]
    assert filled.read_bytes() == before


def test_damaged_data_as_text(run: Run, filled: Path) -> None:
    offset = damage_data(run, filled)
    said = run("verify", filled)
    assert said.code == 3
    lines = said.stdout.splitlines()
    assert f"error data-checksum: file data at {offset:#x}" in lines
    assert "    in /run1/a.pt (inode 3): bytes 0 to 65536, committed" in lines
    assert lines[-3].startswith("damaged: 1 finding in structures and data, checked in ")
    assert lines[-1] == "next: restore the file from another copy, or delete it"


# --- repair -------------------------------------------------------------------------------------


def test_repair_says_what_it_does_and_keeps_a_copy(run: Run, filled: Path) -> None:
    flip(filled, SECOND_COPY + 40)
    said = run("verify", filled)
    assert said.code == 3
    assert "redundancy is lost: 1 finding" in said.stdout
    assert said.stdout.endswith(f"next: cxlfs verify {filled} --repair\n")
    before = filled.read_bytes()

    said = run("verify", filled, "--repair")
    assert (said.code, said.stderr) == (4, "")
    lines = said.stdout.splitlines()
    (announced,) = [line for line in lines if line.startswith("will ")]
    assert f"{SECOND_COPY:#x}" in announced
    assert lines.index(announced) < lines.index("repaired: 1 finding, none is left")
    (saved,) = filled.parent.glob("store.cxlfs.saved-*")
    assert lines[-2] == f"saved copy of what was changed: {saved}"
    after = filled.read_bytes()
    changed = [i for i in range(0, len(before), 512) if before[i : i + 512] != after[i : i + 512]]
    assert changed == [SECOND_COPY]
    assert run("verify", filled).code == 0

    said = run("verify", filled, "--undo", saved)
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout.splitlines() == [
        f"undone: 512 bytes are as they were saved in {saved}",
        f"next: cxlfs verify {filled}",
    ]
    assert filled.read_bytes() == before
    found = run("verify", filled, "--undo", saved, "--json").document
    assert (found["message_type"], found["length"]) == ("undone", 512)


def test_undo_of_what_is_no_saved_copy(run: Run, filled: Path, tmp_path: Path) -> None:
    before = filled.read_bytes()
    said = run("verify", filled, "--undo", tmp_path / "no")
    step = "name the copy that --repair said it saved"
    assert_two_lines(said, 1, "cxlfs verify", "cannot read", "No such file", step)
    said = run("verify", filled, "--undo", filled)
    assert_two_lines(said, 1, "cxlfs verify", "is not a saved copy", step)
    said = run("verify", filled, "--undo", filled, "--repair")
    assert_two_lines(said, 2, "cxlfs verify", "--undo takes no other option")
    assert filled.read_bytes() == before


def test_undo_is_refused_when_the_store_was_written_since(run: Run, filled: Path) -> None:
    flip(filled, SECOND_COPY + 40)
    assert run("verify", filled, "--repair").code == 4
    (saved,) = filled.parent.glob("store.cxlfs.saved-*")
    assert run("verify", filled, "--record").code == 0  # opens and closes the store, as a mount
    said = run("verify", filled, "--undo", saved)
    assert_two_lines(said, 1, "cxlfs verify", "has been written since it was repaired")


# --- what the store remembers -------------------------------------------------------------------


def test_record_lets_the_store_remember(run: Run, filled: Path) -> None:
    damage_data(run, filled)
    before = filled.read_bytes()
    assert run("verify", filled).code == 3
    assert filled.read_bytes() == before, "without --record nothing is written"
    assert run("list", filled, "--json").document["checkpoints"][-1]["state"] == "not inspected"

    said = run("verify", filled, "--record", "--json")
    assert said.code == 3
    assert said.documents[-1]["recorded"] is True
    status = run("status", filled, "--json").document
    assert (status["state"], status["status"]) == (
        "NEEDS-CHECK",
        "the data of a file is damaged: /run1/a.pt",
    )
    assert status["damaged_paths"] == ["/run1/a.pt"]
    last = status["last_verify"]
    assert (last["errors"], last["warnings"], last["kinds"]) == (1, 0, ["data-checksum"])
    assert (last["structure_only"], last["complete"]) == (False, True)
    assert run("list", filled, "--json").document["checkpoints"][-1]["state"] == "damaged"
    shown = run("status", filled).stdout
    assert f"verified: {last['time']}, 1 finding (structures and data): data-checksum\n" in shown


def test_a_run_that_finds_nothing_clears_what_was_remembered(run: Run, filled: Path) -> None:
    offset = damage_data(run, filled)
    assert run("verify", filled, "--record").code == 3
    flip(filled, offset + 100)  # back again
    assert run("verify", filled, "--record", "--structure-only").code == 0
    assert run("status", filled, "--json").document["damaged_files"] == 1
    said = run("verify", filled, "--record")
    assert said.code == 0
    assert "not recorded" not in said.stdout
    status = run("status", filled, "--json").document
    assert (status["state"], status["damaged_files"]) == ("OFFLINE", 0)
    assert "clean (structures and data)" in run("status", filled).stdout


def test_a_repair_is_remembered_with_record(run: Run, filled: Path) -> None:
    flip(filled, SECOND_COPY + 40)
    assert run("verify", filled, "--record").code == 3
    status = run("status", filled, "--json").document
    assert status["status"] == "the last verify found: superblock-copy-damaged"
    said = run("verify", filled, "--repair")
    assert said.code == 4
    assert "let the store remember what is left" in said.stdout
    assert run("status", filled, "--json").document["state"] == "OFFLINE"


def test_repair_json(run: Run, filled: Path) -> None:
    flip(filled, SECOND_COPY + 40)
    said = run("verify", filled, "--repair", "--json")
    assert said.code == 4
    (repair,) = of_type(said, "repair")
    assert isinstance(repair.pop("text"), str)
    assert repair == {
        "schema": "cxlfs.verify/1",
        "message_type": "repair",
        "id": "rewrite-copy",
        "media_offset": SECOND_COPY,
        "length": 512,
        "repairs": ["superblock-copy-damaged"],
    }
    summary = said.documents[-1]
    counts = [summary[key] for key in ("findings", "warnings", "repairable", "repairs")]
    assert counts == [1, 1, 1, 1]
    assert (summary["remaining"], summary["next_step"]) == (0, None)
    (saved,) = filled.parent.glob("store.cxlfs.saved-*")
    assert summary["saved_copy"] == str(saved)


def test_what_cannot_be_repaired_is_left(run: Run, filled: Path) -> None:
    damage_data(run, filled)
    before = filled.read_bytes()
    said = run("verify", filled, "--repair")
    assert said.code == 3
    assert "will " not in said.stdout
    assert list(filled.parent.glob("*.saved-*")) == []
    assert filled.read_bytes() == before
    flip(filled, SECOND_COPY + 40)
    said = run("verify", filled, "--repair", "--json")
    assert said.code == 3
    summary = said.documents[-1]
    assert [summary[key] for key in ("findings", "repairs", "remaining")] == [2, 1, 1]


def test_repair_of_a_clean_store_changes_nothing(run: Run, filled: Path) -> None:
    before = filled.read_bytes()
    assert run("verify", filled, "--repair").code == 0
    assert filled.read_bytes() == before
    assert list(filled.parent.glob("*.saved-*")) == []


def test_every_superblock_copy_damaged_is_a_finding(run: Run, filled: Path) -> None:
    for offset in (0, 2 * MIB, 60 * MIB, 62 * MIB):
        flip(filled, offset + 40)
    said = run("verify", filled, "--json")
    assert said.code == 3
    assert of_type(said, "finding")[0]["id"] == "superblock-unusable"
    skipped = [found for found in of_type(said, "pass") if found["skipped"] is not None]
    assert len(skipped) == said.documents[-1]["passes_skipped"] > 0
    assert "not run: there is no superblock" in run("verify", filled).stdout


def test_nothing_is_repaired_when_the_copy_cannot_be_saved(
    run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(filled, SECOND_COPY + 40)
    before = filled.read_bytes()
    nowhere = filled.parent / "no" / "copy"
    monkeypatch.setattr(verify, "_saved_copy_path", lambda _source: nowhere)
    said = run("verify", filled, "--repair")
    assert said.code == 1
    assert said.stderr.startswith("cxlfs verify: nothing was changed: cannot write ")
    assert f"next: make sure that {nowhere.parent} can be written" in said.stderr
    assert filled.read_bytes() == before


# --- mounted ------------------------------------------------------------------------------------


@pytest.mark.mounted
def test_a_mounted_store_is_checked_by_its_daemon(run: Run) -> None:
    reason = why_not_mountable()
    if reason is not None:
        pytest.skip(f"cannot mount here: {reason}")
    with workplace() as place:
        place.mount()
        (place.mountpoint / "a.pt").write_bytes(b"x" * 100_000)
        place.remount()
        for target in (place.mountpoint, place.source):
            said = run("verify", target)
            assert (said.code, said.stderr) == (0, "")
            assert "clean: structures and data" in said.stdout
        said = run("verify", place.mountpoint, "--repair")
        words = ("is mounted", f"cxlfs umount {place.mountpoint}", f"verify {place.source}")
        assert_two_lines(said, 11, "cxlfs verify", *words)

        found = run("dump", place.source, "journal", "--json").documents
        assert found
        place.announced.append("check|damage|checksum")
        place.unmount()
        ino = run("dump", place.source, "inode", "2", "--json").document
        flip(place.source, ino["versions"][0]["references"][0]["media_offset"])
        flip(place.source, 2 * MIB + 40)
        place.mount()
        said = run("verify", place.mountpoint, "--json")
        assert said.code == 3
        assert [finding["id"] for finding in of_type(said, "finding")] == [
            "superblock-copy-damaged",
            "data-checksum",
        ]
        assert of_type(said, "finding")[1]["path"] == "/a.pt"
        (place.mountpoint / "a.pt").unlink()
        said = run("verify", place.mountpoint)
        repair = f"cxlfs umount {place.mountpoint}; cxlfs verify {place.source} --repair"
        assert said.stdout.splitlines()[-1] == f"next: {repair}"
        said = run_program("-n", place.source, program="fsck.cxlfs")
        assert_two_lines(said, 8, "fsck.cxlfs", f"cxlfs verify {place.mountpoint}")
        assert run_program("-M", place.source, program="fsck.cxlfs").code == 0
        place.unmount()
        assert run("verify", place.source, "--repair").code == 4
        assert mountinfo.find_mount(str(place.mountpoint)) is None


# --- fsck ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [[], ["-n"], ["-p"], ["-a", "-C"], ["-y", "-C5"], ["-C", "0"], ["-n", "-f", "-v"]]
)
def test_fsck_of_a_clean_store(filled: Path, options: list[str]) -> None:
    before = filled.read_bytes()
    said = run_program(*options, filled, program="fsck.cxlfs")
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout.splitlines()[-1].startswith("clean: structures ")
    assert filled.read_bytes() == before


def test_fsck_leaves_damage_or_corrects_it(filled: Path) -> None:
    flip(filled, SECOND_COPY + 40)
    assert run_program(filled, program="fsck.cxlfs").code == 4
    assert run_program("-n", filled, program="fsck.cxlfs").code == 4
    assert run_program("-p", filled, program="fsck.cxlfs").code == 1
    assert run_program("-p", filled, program="fsck.cxlfs").code == 0


def test_fsck_reads_data_with_f(run: Run, filled: Path) -> None:
    damage_data(run, filled)
    assert run_program(filled, program="fsck.cxlfs").code == 0
    assert run_program("-f", filled, program="fsck.cxlfs").code == 4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["/nonexistent"], 8, "does not exist"),
        ([], 16, "missing argument"),
        (["-a", "-n", "/nonexistent"], 16, "-n changes nothing"),
        (["--frob", "/nonexistent"], 16, "no such option"),
    ],
)
def test_fsck_codes_of_failures(arguments: list[str], code: int, words: str) -> None:
    assert_two_lines(run_program(*arguments, program="fsck.cxlfs"), code, "fsck.cxlfs", words)


def test_fsck_of_a_store_in_use(filled: Path) -> None:
    media = open_media(filled)
    said = run_program(filled, program="fsck.cxlfs")
    media.close()
    assert_two_lines(said, 8, "fsck.cxlfs", "in use", str(os.getpid()))
