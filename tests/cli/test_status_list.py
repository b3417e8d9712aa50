"""status and list on a source that is not mounted; through a daemon: ``test_mounted``."""

from __future__ import annotations

import datetime as dt
import os
import re
import uuid
from pathlib import Path

import pytest

from cxlfs.cli.list import Checkpoint, Checkpoints
from cxlfs.cli.output import Style
from cxlfs.cli.status import Status
from cxlfs.control.discovery import Registration
from cxlfs.media import open_media
from cxlfs.media.room import VOLATILE_TEXT
from cxlfs.store import Store
from cxlfs.units import MIB
from tests.support.cli import Run, assert_two_lines
from tests.support.mount import is_in_memory


def save(store: Store, parent: int, name: bytes, data: bytes) -> int:
    """A complete file; returns its inode number."""
    attributes, handle = store.create(parent, name, 0o644, 0, 0, os.O_WRONLY)
    assert store.write(handle, 0, data) == len(data)
    store.flush(handle, writer_killed=False)
    store.release(handle)
    return attributes.ino


@pytest.fixture
def filled(source: Path) -> Path:
    """A complete file, a directory of two, a file in the making, an overwrite in the making."""
    media = open_media(source)
    store = Store.open(media)
    store.pin(1)
    run1 = store.make_directory(1, b"run1", 0o755, 0, 0).ino
    save(store, run1, b"a.pt", bytes(3 * MIB))
    save(store, run1, b"b\xff\n.pt", b"x" * 5000)
    overwritten = save(store, 1, b"last.pt", b"old" * 1000)
    _, making = store.create(1, b"new.log", 0o644, 0, 0, os.O_WRONLY)
    store.write(making, 0, b"beginning")
    again = store.open_file(overwritten, os.O_WRONLY | os.O_TRUNC)
    store.write(again, 0, b"new" * 500)
    store.close()
    media.close()
    return source


# --- status -------------------------------------------------------------------------------------


def test_status_of_a_fresh_store(run: Run, source: Path) -> None:
    said = run("status", source)
    assert said.code == 0
    assert said.stderr == ""
    shown = dict(line.strip().split(": ", 1) for line in said.stdout.splitlines())
    if is_in_memory(source):
        assert "gone with the power" in shown.pop("caution")
    assert list(shown) == [
        "store",
        "state",
        "status",
        "action",
        "source",
        "media",
        "space",
        "journal",
        "contents",
        "recovery",
        "errors",
        "verified",
    ]
    assert shown["state"] == "OFFLINE"
    assert shown["status"] == "not mounted; closed cleanly"
    assert shown["action"] == f"to use it: cxlfs mount {source} MOUNTPOINT"
    assert shown["store"].startswith("small  ")
    media = "file, 64.0 MiB, page granularity, write-back msync, "
    assert shown["media"].startswith(media)
    pages = r"page size unknown|(4\.0 K|2\.0 M)iB pages( for \d+% of what is mapped)?"
    assert re.fullmatch(pages, shown["media"].removeprefix(media))
    assert shown["contents"] == "0 files, 1 directory"
    assert shown["errors"] == "none"
    assert shown["verified"] == "never"


def test_status_json(run: Run, filled: Path) -> None:
    found = run("status", filled, "--json").document
    media = open_media(filled, read_only=True)
    store = Store.open(media)
    statistics = store.statistics()
    store.close()
    media.close()
    assert found["schema"] == "cxlfs.status/1"
    assert found["source"] == str(filled)
    assert (found["mountpoint"], found["pid"], found["log_path"]) == (None, None, None)
    assert found["uuid"] == str(uuid.UUID(bytes=statistics.uuid))
    assert found["label"] == "small"
    assert found["state"] == "OFFLINE"
    assert found["read_only"] is True
    assert found["media"]["page_size_bytes"] in (None, 4096, 2 * MIB)
    assert 0 <= (found["media"]["huge_page_share"] or 0) <= 1
    assert found["media"] == {
        "kind": "file",
        "size_bytes": 64 * MIB,
        "granularity": "page",
        "write_back": "msync",
        "persistence_domain": None,
        "alignment_bytes": 2 * MIB,
        "page_size_bytes": found["media"]["page_size_bytes"],
        "huge_page_share": found["media"]["huge_page_share"],
        "dirty_shutdowns": None,
        "volatile": media.volatile,
    }
    weakened = [VOLATILE_TEXT] if media.volatile else []
    assert (found["options"], found["weakened"]) == (None, weakened)
    assert (found["damaged_files"], found["damaged_paths"]) == (0, [])
    assert (found["last_verify"], found["refused_writes"]) == (None, None)
    assert found["space"] == {
        "size_bytes": 64 * MIB,
        "used_bytes": statistics.used_bytes,
        "free_bytes": statistics.free_bytes,
        "reserved_bytes": statistics.reserved_bytes,
        "incomplete_bytes": statistics.incomplete_bytes,
        "segment_size_bytes": 2 * MIB,
        "segments": 28,
        "segments_free": statistics.segments_free,
    }
    assert found["space"]["incomplete_bytes"] > 0
    assert found["journal"]["last_commit"] == statistics.last_lsn > 5
    time = dt.datetime.fromisoformat(found["journal"]["last_commit_time"])
    assert abs(time.timestamp() - statistics.last_commit_time_ns / 1e9) < 0.002
    assert found["contents"] == {"files": 4, "directories": 2, "open_files": 0}
    assert found["errors"] == {"checksum": 0, "media": 0, "no_space": 0}
    assert found["recovery"]["clean"] is True
    assert set(found["activity"].values()) >= {0}


def test_status_after_an_unclean_end(run: Run, source: Path) -> None:
    media = open_media(source)
    store = Store.open(media)
    store.make_directory(1, b"d", 0o755, 0, 0)
    store.fsync_directory(1)
    store.abandon()
    media.close()
    before = source.read_bytes()
    found = run("status", source, "--json").document
    assert found["state"] == "OFFLINE"
    assert found["status"] == "not mounted; not closed cleanly: the next mount recovers it"
    assert found["recovery"]["clean"] is False
    assert found["recovery"]["records"] == 1
    assert found["contents"]["directories"] == 2
    assert "1 journal record replayed" in run("status", source).stdout
    assert source.read_bytes() == before, "looking changes nothing"


REFUSED = (
    "refused for want of space since 1970-01-01T00:00:00.000Z; nothing that was committed is lost"
)


def message(**changes: object) -> dict[str, object]:
    """What a daemon answers to ``status``."""
    return {"state": "ONLINE", "reason": None, "media": {"path": "/dev/dax0.0"}, **changes}


@pytest.mark.parametrize(
    ("changes", "state", "status", "action"),
    [
        ({}, "ONLINE", None, None),
        (
            {"state": "READ-ONLY", "reason": "it was opened read-only"},
            "READ-ONLY",
            "it was opened read-only",
            "to write: cxlfs umount /mnt/c; cxlfs mount /dev/dax0.0 /mnt/c",
        ),
        (
            {"state": "READ-ONLY", "reason": "the media failed: msync"},
            "READ-ONLY",
            "the media failed: msync",
            "read the log /run/c.log, then unmount and run: cxlfs verify /dev/dax0.0",
        ),
        (
            {"state": "NEEDS-CHECK", "reason": "the last verify found: root-lost"},
            "NEEDS-CHECK",
            "the last verify found: root-lost",
            "run: cxlfs verify /mnt/c",
        ),
        (
            {"media_errors": 2},
            "NEEDS-CHECK",
            "the media failed while reading",
            "run: cxlfs verify /mnt/c",
        ),
        (
            {"no_space_errors": 3},  # there is room again
            "ONLINE",
            None,
            None,
        ),
        (
            {"refused_writes": {"count": 3, "since_ns": 1, "last_ns": 2, "needed_bytes": 5 << 30}},
            "ONLINE",
            f"3 writes were {REFUSED}",
            "delete checkpoints that are no longer needed, until 5.0 GiB are free",
        ),
        (
            {"refused_writes": {"count": 1, "since_ns": 1, "last_ns": 2, "needed_bytes": 0}},
            "ONLINE",
            f"1 write was {REFUSED}",
            "delete checkpoints that are no longer needed",
        ),
        (
            {
                "state": "NEEDS-CHECK",
                "reason": "damaged: /a",
                "damaged_files": 1,
            },
            "NEEDS-CHECK",
            "damaged: /a",
            "save them again, or delete them; cxlfs verify /mnt/c names every one",
        ),
    ],
)
def test_what_a_mounted_store_says(
    changes: dict[str, object], state: str, status: str | None, action: str | None
) -> None:
    daemon = Registration(
        uuid="u", pid=7, source="/dev/dax0.0", mountpoint="/mnt/c", log_path="/run/c.log"
    )
    found = Status.from_message(message(**changes), daemon)
    assert (found.state, found.status, found.action) == (state, status, action)


def test_an_answer_with_parts_missing_or_wrong_is_shown_all_the_same() -> None:
    odd = message(recovery=7, media=None, files="many", label=None, last_lsn=None)
    found = Status.from_message(odd, None)
    assert (found.contents.files, found.label, found.media.kind) == (0, "", "")


# --- list ---------------------------------------------------------------------------------------


def test_list_shows_states_sizes_and_commits(run: Run, filled: Path) -> None:
    said = run("list", filled)
    assert said.code == 0
    header, *rows = said.stdout.splitlines()
    assert header.split() == ["STATE", "COMMIT", "COMMITTED", "SIZE", "PATH"]
    column = header.index("PATH")
    assert [row[column:] for row in rows] == ["/last.pt", "/last.pt", "/new.log", "/run1/"]
    assert [row[: header.index("COMMIT")].strip() for row in rows] == [
        "not inspected",
        "incomplete, kept aside",
        "incomplete",
        "not inspected",
    ]


def test_list_json(run: Run, filled: Path) -> None:
    found = run("list", filled, "/run1/", "--json").document
    assert found["schema"] == "cxlfs.list/1"
    assert found["path"] == "/run1"
    first, second = found["checkpoints"]
    time = dt.datetime.fromisoformat(first.pop("commit_time"))
    assert abs(time.timestamp() - dt.datetime.now(dt.UTC).timestamp()) < 600
    assert first.pop("commit") > 1
    assert first == {
        "path": "/run1/a.pt",
        "kind": "file",
        "state": "not inspected",
        "kept_aside": False,
        "being_written": False,
        "set_known": True,
        "size_bytes": 3 * MIB,
        "files": 1,
        "format": None,  # not mounted: nobody looks inside
        "step": None,
        "reason": None,
        "checkpoints": 0,
        "failed_resumes": 0,
        "suspect": None,
        "places": ["cxl"],
    }
    assert second["path"] == "/run1/b\\xff\n.pt"
    assert second["path_b64"] == "L3J1bjEvYv8KLnB0"
    assert second["size_bytes"] == 5000


def entry_of(**changes: object) -> Checkpoint:
    plain = {"path": "/x", "kind": "file", "state": "complete", "size_bytes": 1, "files": 1}
    return Checkpoint.from_message(plain | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "complete"),
        ({"being_written": True}, "complete, being written"),
        ({"being_written": True, "size_bytes": 0}, "complete, being written"),
        ({"state": "incomplete", "being_written": True}, "incomplete, being written"),
        ({"state": "incomplete"}, "incomplete"),
        ({"size_bytes": 0}, "complete, empty"),
        ({"state": "incomplete", "kept_aside": True}, "incomplete, kept aside"),
        ({"kind": "directory"}, "complete, set unknown"),
        ({"kind": "directory", "files": 0}, "empty"),
        ({"kind": "directory", "state": "damaged"}, "damaged"),
        ({"kind": "directory", "being_written": True}, "complete, being written"),
    ],
)
def test_list_says_what_is_known(changes: dict[str, object], words: str) -> None:
    assert entry_of(**changes).words == words


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (None, ["STATE", "COMMIT", "COMMITTED", "SIZE", "PATH"]),
        (200, ["STATE", "COMMIT", "COMMITTED", "SIZE", "PATH"]),
        (48, ["STATE", "COMMITTED", "SIZE", "PATH"]),
        (20, ["STATE", "SIZE", "PATH"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns(width: int | None, header: list[str]) -> None:
    found = entry_of(commit_lsn=7, commit_time_ns=1)
    first, row = Checkpoints(None, b"/", (found,)).lines(Style(width=width))
    assert first.split() == header
    assert row.endswith("1 B  /x")
    assert width is None or width < 48 or len(row) <= width


def test_list_of_what_is_kept_aside(run: Run, filled: Path) -> None:
    entries = run("list", filled, "--json").document["checkpoints"]
    aside = [entry for entry in entries if entry["kept_aside"]]
    assert [(e["path"], e["state"], e["size_bytes"], e["commit"]) for e in aside] == [
        ("/last.pt", "incomplete", 1500, None)
    ]
    kept = next(e for e in entries if e["path"] == "/last.pt" and not e["kept_aside"])
    assert (kept["state"], kept["size_bytes"]) == ("not inspected", 3000)


def test_a_directory_stands_for_what_is_below(run: Run, filled: Path) -> None:
    entry = run("list", filled, "--json").document["checkpoints"][-1]
    assert (entry["path"], entry["kind"], entry["files"]) == ("/run1", "directory", 2)
    assert entry["size_bytes"] == 3 * MIB + 5000


def test_names_with_control_characters_are_escaped(run: Run, filled: Path) -> None:
    said = run("list", filled, "run1")
    assert said.stdout.splitlines()[-1].endswith("/run1/b\\xff\\n.pt")


@pytest.mark.parametrize("path", ["/", "", ".", "//run1/..", "/../.."])
def test_ways_to_name_the_root(run: Run, filled: Path, path: str) -> None:
    assert run("list", filled, path, "--json").document["path"] == "/"


def test_list_of_one_file(run: Run, filled: Path) -> None:
    found = run("list", filled, "/run1/a.pt", "--json").document
    assert [entry["path"] for entry in found["checkpoints"]] == ["/run1/a.pt"]


def test_list_of_an_empty_store(run: Run, source: Path) -> None:
    assert run("list", source).stdout == "no checkpoints in /\n"
    assert run("list", source, "--json").document["checkpoints"] == []


@pytest.mark.parametrize("path", ["/nowhere", "/last.pt/below", "/" + "x" * 300])
def test_list_of_what_is_not_there(run: Run, filled: Path, path: str) -> None:
    assert_two_lines(run("list", filled, path), 1, "cxlfs list")


# --- sources that are none ----------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["status", "list", "verify"])
class TestWrongSources:
    def test_missing(self, run: Run, tmp_path: Path, verb: str) -> None:
        said = run(verb, tmp_path / "no")
        assert_two_lines(said, 16, f"cxlfs {verb}", f"{tmp_path}/no does not exist")

    def test_directory(self, run: Run, tmp_path: Path, verb: str) -> None:
        said = run(verb, tmp_path)
        assert_two_lines(said, 16, f"cxlfs {verb}", "is a directory", "no store is mounted there")

    def test_empty(self, run: Run, tmp_path: Path, verb: str) -> None:
        (tmp_path / "empty").touch()
        assert_two_lines(run(verb, tmp_path / "empty"), 16, f"cxlfs {verb}", "is empty")

    @pytest.mark.parametrize("size", [1, 4096, 64 * MIB])
    def test_not_a_store(self, run: Run, tmp_path: Path, verb: str, size: int) -> None:
        with (tmp_path / "zeros").open("wb") as file:
            file.truncate(size)
        said = run(verb, tmp_path / "zeros")
        assert_two_lines(said, 10, f"cxlfs {verb}", "mkfs")

    @pytest.mark.parametrize("size", [63 * MIB, 32 * MIB, 5 * MIB, 3 * MIB])
    def test_truncated(self, run: Run, source: Path, verb: str, size: int) -> None:
        os.truncate(source, size)
        said = run(verb, source)
        assert_two_lines(said, 13, f"cxlfs {verb}", "it shrank or was cut", str(size))

    def test_a_newer_format(self, run: Run, source: Path, verb: str) -> None:
        write_newer_format(source)
        assert_two_lines(run(verb, source), 12, f"cxlfs {verb}", "format version 2")

    def test_in_use(self, run: Run, source: Path, verb: str) -> None:
        media = open_media(source)
        said = run(verb, source)
        media.close()
        assert_two_lines(said, 11, f"cxlfs {verb}", "in use", str(os.getpid()))


def write_newer_format(source: Path) -> None:
    """All superblock copies claim format version 2, with right checksums."""
    from cxlfs.native import crc32c

    with source.open("r+b") as file:
        for offset in (0, 2 * MIB, 60 * MIB, 62 * MIB):
            file.seek(offset)
            copy = bytearray(file.read(512))
            copy[8:12] = (2).to_bytes(4, "little")
            copy[504:508] = crc32c(bytes(copy[:504])).to_bytes(4, "little")
            file.seek(offset)
            file.write(copy)
