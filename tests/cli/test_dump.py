"""``cxlfs dump`` and ``cxlfs.verify.inspect``: the decoded structures are those of the format."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from cxlfs.errors import CxlfsError
from cxlfs.format import layout, roots, superblock
from cxlfs.media import MemoryMedia, open_media
from cxlfs.store import Store
from cxlfs.units import MIB
from tests.support.cli import Run, assert_two_lines
from tests.support.hostile import DUMPS


@pytest.fixture
def used(source: Path) -> Path:
    """Closed cleanly once, then used again and left without closing."""
    media = open_media(source)
    store = Store.open(media)
    store.make_directory(1, b"run1", 0o755, 10, 20)
    store.close()
    store = Store.open(media)
    attributes, handle = store.create(2, b"a\xff", 0o640, 10, 20, os.O_WRONLY)
    store.write(handle, 0, bytes(200_000))
    store.flush(handle, writer_killed=False)
    store.release(handle)
    store.link(attributes.ino, 1, b"second")
    store.set_xattr(attributes.ino, b"user.epoch", b"\x07\xfe")
    store.make_symlink(1, b"latest", b"run1/a", 0, 0)
    store.fsync_directory(1)
    store.abandon()
    media.close()
    return source


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_superblock_copies(run: Run, used: Path) -> None:
    copies = run("dump", used, "superblock", "--json").documents
    assert [copy["copy"] for copy in copies] == [0, 1, 2, 3]
    assert [copy["media_offset"] for copy in copies] == [0, 2 * MIB, 60 * MIB, 62 * MIB]
    media = open_media(used, read_only=True)
    block, _ = superblock.choose(media)
    media.close()
    for number, copy in enumerate(copies):
        assert copy["schema"] == "cxlfs.dump/1"
        assert copy["structure"] == "superblock"
        assert copy["problem"] is None
        fields = copy["fields"]
        assert fields["copy_number"] == number
        assert fields["label"] == "small"
        assert fields["uuid"].replace("-", "") == block.uuid.hex()
        for name in ("size_bytes", "segment_size_bytes", "segment_count", "created_ns"):
            assert fields[name] == getattr(block, name)
        assert [device["size"] for device in fields["devices"]] == [block.size_bytes]
        known = set(layout.SUPERBLOCK_DTYPE.names or ()) - {"reserved"}
        assert set(fields) == known


def test_a_damaged_copy_is_shown_with_its_problem(run: Run, used: Path) -> None:
    overwrite(used, 100, b"\xff")
    copies = run("dump", used, "superblock", "--json").documents
    assert [copy["problem"] for copy in copies] == [
        "superblock checksum mismatch",
        None,
        None,
        None,
    ]
    assert copies[0]["fields"]["size_bytes"] == 64 * MIB
    text = run("dump", used, "superblock").stdout.splitlines()
    assert text[0] == "superblock at 0x0  damaged: superblock checksum mismatch"


def test_a_wiped_copy_has_no_fields(run: Run, used: Path) -> None:
    overwrite(used, 0, bytes(512))
    copies = run("dump", used, "superblock", "--json").documents
    assert (copies[0]["fields"], copies[0]["problem"]) == ({}, "no cxlfs superblock here")


def test_roots(run: Run, used: Path) -> None:
    slots = run("dump", used, "roots", "--json").documents
    assert len(slots) == 16
    newest = [slot for slot in slots if slot["newest"]]
    assert [slot["ring"] for slot in newest] == [0, 1]
    assert newest[0]["fields"] == newest[1]["fields"]
    assert newest[0]["in_use"] is True
    assert newest[0]["fields"]["journal_segment"] is not None
    generations = {s["fields"]["generation"] for s in slots if s["state"] == "good"}
    assert newest[0]["fields"]["generation"] == max(generations)
    unused = [slot for slot in slots if slot["state"] == "never written"]
    assert all(slot["fields"] == {} and slot["problem"] is None for slot in unused)
    text = run("dump", used, "roots").stdout
    assert f"root at {unused[0]['media_offset']:#x}  ring=0" in text


def test_a_damaged_root(run: Run, used: Path) -> None:
    slot = next(s for s in run("dump", used, "roots", "--json").documents if s["newest"])
    overwrite(used, slot["media_offset"] + 40, b"\xff\xff")
    found = run("dump", used, "roots", "--json").documents
    damaged = next(s for s in found if s["media_offset"] == slot["media_offset"])
    assert (damaged["state"], damaged["problem"]) == ("damaged", "root checksum mismatch")
    assert sum(s["newest"] for s in found) == 1


def test_segments(run: Run, used: Path) -> None:
    found = run("dump", used, "segments", "--json").documents
    assert [segment["index"] for segment in found] == list(range(28))
    assert [s["media_offset"] for s in found] == [4 * MIB + i * 2 * MIB for i in range(28)]
    by_role = {role: [s for s in found if s["role"] == role] for role in ("data", "image", None)}
    assert by_role["data"]
    assert by_role["image"]
    assert all(s["fields"] == {} and s["problem"] is None for s in by_role[None])
    named = [s for s in found if s["named_by_newest_root"]]
    assert sorted(s["role"] for s in named) == ["image", "journal", "journal"]
    assert all(len(line) < 250 for line in run("dump", used, "segments").stdout.splitlines())


def test_journal(run: Run, used: Path) -> None:
    found = run("dump", used, "journal", "--json").documents
    head, *records, end = found
    assert head["structure"] == "journal segment"
    assert end["structure"] == "journal end"
    assert {record["structure"] for record in records} == {"journal record"}
    lsns = [record["lsn"] for record in records]
    assert lsns == list(range(head["first_lsn"], end["last_lsn"] + 1))
    assert all(record["problem"] is None for record in records)
    done = [operation for record in records for operation in record["operations"]]
    names = [operation["name"] for operation in done if operation["operation"] == "link"]
    assert names == ["a\\xff", "second", "latest"]
    assert any(op.get("name_b64") == "Yf8=" for op in done)
    content = [op for op in done if op["operation"] == "content" and op["size"] == 200_000]
    assert sum(reference["length"] for reference in content[-1]["refs"]) >= 200_000
    extents = [op for op in done if op["operation"] == "extent"]
    assert all(crc.startswith("0x") and len(crc) == 10 for op in extents for crc in op["crcs"])
    text = run("dump", used, "journal").stdout
    assert "- operation=link  parent=1" in text
    assert "name=a\\xff" in text


def test_the_journal_of_a_closed_store(run: Run, source: Path) -> None:
    (end,) = run("dump", source, "journal", "--json").documents
    assert end["structure"] == "journal end"
    assert end["reason"] == "closed cleanly: the image has everything"


def test_a_journal_damaged_in_both_copies(run: Run, used: Path) -> None:
    head, *records, _ = run("dump", used, "journal", "--json").documents
    place = records[1]["media_offset"]
    mirror = place - head["media_offset"] + head["mirror_media_offset"]
    overwrite(used, place + 8, b"\xff")
    found = run("dump", used, "journal", "--json").documents
    assert [item["copy"] for item in found[1:-1]][1] == 1, "read from the mirror"
    overwrite(used, mirror + 8, b"\xff")
    end = run("dump", used, "journal", "--json").documents[-1]
    assert end["last_lsn"] == records[0]["lsn"]


def test_inode(run: Run, used: Path) -> None:
    found = run("dump", used, "inode", "3", "--json").document
    assert found["structure"] == "inode"
    assert (found["kind"], found["size"], found["nlink"]) == ("file", 200_000, 2)
    assert (found["uid"], found["gid"], found["mode"] & 0o777) == (10, 20, 0o640)
    assert found["paths"] == ["/second", "/run1/a\\xff"]
    assert found["xattrs"] == [{"name": "user.epoch", "value": "\x07\\xfe", "value_b64": "B/4="}]
    assert found["state"] == "complete"
    (version,) = found["versions"]
    assert version["version"] == "live"
    assert sum(reference["length"] for reference in version["references"]) == 200_000
    first = version["references"][0]
    media = open_media(used, read_only=True)
    head = first["extent_id"].to_bytes(8, "little") + bytes(8)
    length = min(first["extent_length"], layout.CHUNK_BYTES)
    from cxlfs.native import crc32c

    data = media.read(first["media_offset"], length)
    media.close()
    assert first["crcs"][0] == f"{crc32c(head + data):#010x}", "the place and checksum are real"


def test_inodes_of_other_kinds(run: Run, used: Path) -> None:
    root = run("dump", used, "inode", "1", "--json").document
    assert (root["kind"], root["paths"], "versions" in root) == ("directory", ["/"], False)
    link = run("dump", used, "inode", "4", "--json").document
    assert (link["kind"], link["target"]) == ("symlink", "run1/a")


@pytest.mark.parametrize("number", ["0", "5", "99999999999999999999999"])
def test_an_inode_that_is_not_there(run: Run, used: Path, number: str) -> None:
    said = run("dump", used, "inode", number)
    assert_two_lines(said, 1, "cxlfs dump", f"no inode has the number {number}", "ls -i")


@pytest.mark.parametrize("what", ["superblock", "roots", "segments", "journal"])
class TestSources:
    def test_of_a_store_in_use(self, run: Run, used: Path, what: str) -> None:
        media = open_media(used)
        said = run("dump", used, what)
        media.close()
        assert said.code == 0
        assert said.stdout

    def test_nothing_is_changed(self, run: Run, used: Path, what: str) -> None:
        before = hashlib.sha256(used.read_bytes()).digest()
        used.chmod(0o400)
        assert run("dump", used, what).code == 0
        assert hashlib.sha256(used.read_bytes()).digest() == before

    def test_not_a_store(self, run: Run, tmp_path: Path, what: str) -> None:
        (tmp_path / "zeros").write_bytes(bytes(MIB))
        assert_two_lines(run("dump", tmp_path / "zeros", what), 10, "cxlfs dump", "cxlfs store")

    def test_missing(self, run: Run, tmp_path: Path, what: str) -> None:
        assert_two_lines(run("dump", tmp_path / "no", what), 16, "cxlfs dump", "does not exist")

    def test_truncated(self, run: Run, used: Path, what: str) -> None:
        os.truncate(used, 32 * MIB)
        assert_two_lines(run("dump", used, what), 13, "cxlfs dump", "it shrank or was cut")


def test_an_inode_of_a_store_in_use_is_refused(run: Run, used: Path) -> None:
    media = open_media(used)
    said = run("dump", used, "inode", "1")
    media.close()
    assert_two_lines(said, 11, "cxlfs dump", str(os.getpid()))


def test_damaged_media_end_in_an_error_or_an_answer() -> None:
    """Random damage anywhere in the metadata: every dump ends, and only with errors of ours."""
    seed = 20
    print("seed", seed)
    generator = random.Random(seed)
    media = MemoryMedia(8 * MIB)
    geometry = {"unit_bytes": layout.UNIT_BYTES_TEST, "segment_size_bytes": 64 << 10}
    Store.format(media, **geometry)
    store = Store.open(media)
    for number in range(20):
        store.make_directory(1, b"d%d" % number, 0o755, 0, 0)
    store.abandon()
    clean = media.read(0, media.size_bytes)
    block, _ = superblock.choose(media)
    newest = roots.candidates(roots.read_slots(media, block))[0]
    places = [*block.copy_offsets]
    places += [ring + slot * layout.SLOT_BYTES for ring in block.ring_offsets for slot in range(3)]
    places += [block.segment_offset(index) for index in newest.segments]
    outcomes = set()
    for _ in range(150):
        media.store(0, clean)
        for _ in range(generator.choice((1, 5, 40))):
            offset = generator.choice(places) + generator.randrange(8192)
            media.store(offset, generator.randbytes(generator.choice((1, 4, 64))))
        for dump in DUMPS:
            try:
                outcomes.add(len(list(dump(media))) > 0)
            except CxlfsError as error:
                outcomes.add(error.id)
    assert True in outcomes
    assert len(outcomes) > 1, "the damage was never noticed"
    media.close()
