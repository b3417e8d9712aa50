"""Passes 7 to 9: extents, namespace, references. Checksums are made right after the damage, as by a
writer with a defect, so that only what the numbers say is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cxlfs.format import layout
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from cxlfs.verify import Finding
from tests.support.corrupt import IMAGE_BYTES, Anatomy, Damage, seal_image, section_rows
from tests.support.stores import format_small, write_file
from tests.support.verdict import findings_of

COLUMN_PASSES = (7, 8, 9)


class Patient:
    """A store with one image only, so that nothing can step in for it; paths and inodes known."""

    def __init__(self) -> None:
        media = MemoryMedia(IMAGE_BYTES)
        format_small(media)
        store = Store.open(media)
        self.a = store.make_directory(1, b"a", 0o755, 0, 0).ino
        self.b = store.make_directory(self.a, b"b", 0o755, 0, 0).ino
        self.one = write_file(store, self.b, b"one", os.urandom(9000))
        self.two = write_file(store, 1, b"two", os.urandom(5000))
        self.link = store.make_symlink(1, b"link", b"target", 0, 0).ino
        store.set_xattr(self.two, b"user.x", b"y")
        store.close()
        Store.open(media).close()
        self.anatomy = Anatomy(media)
        self.damage = Damage(media)

    def rows(self, kind: int) -> list[tuple[int, np.void]]:
        return list(section_rows(self.anatomy, self.anatomy.newest, kind))

    def row_of(self, kind: int, **wanted: int) -> tuple[int, np.void]:
        for offset, row in self.rows(kind):
            if all(int(row[name]) == value for name, value in wanted.items()):
                return offset, row
        raise AssertionError(f"no such row: {wanted}")

    def set(self, offset: int, row: np.void, **values: int) -> None:
        changed = np.array([row], dtype=row.dtype)
        for name, value in values.items():
            changed[name] = value
        self.damage.write(offset, changed.tobytes())

    def diagnose(self) -> list[Finding]:
        """What the three passes find; every root with another image is blotted out."""
        anatomy = self.anatomy
        seal_image(self.damage, anatomy, anatomy.newest)
        for slot in anatomy.slots:
            if slot.root and slot.root.image_segments != anatomy.newest.image_segments:
                self.damage.flip((slot.media_offset + 50) * 8)
        found = findings_of(anatomy.media)
        return [finding for finding in found if finding.pass_id in COLUMN_PASSES]


@pytest.fixture
def patient() -> Iterator[Patient]:
    patient = Patient()
    with patient.damage:
        yield patient


Sign = tuple[str, int | None, bytes | None]


def signs(found: list[Finding]) -> set[Sign]:
    return {(finding.id, finding.ino, finding.path) for finding in found}


def test_a_healthy_patient(patient: Patient) -> None:
    assert patient.diagnose() == []


# --- 7: extents -----------------------------------------------------------------------------


def _last_extent(patient: Patient) -> tuple[int, np.void]:
    """Of the file ``two``: nothing else refers to it."""
    _, inode = patient.row_of(layout.SECTION_INODES, ino=patient.two)
    assert int(inode["ref_count"]) == 1
    position = 0
    for _, row in patient.rows(layout.SECTION_INODES):
        if int(row["ino"]) == patient.two:
            break
        position += int(row["ref_count"]) + int(row["aside_ref_count"])
    _, reference = patient.rows(layout.SECTION_REFS)[position]
    return patient.row_of(layout.SECTION_EXTENTS, id=int(reference["extent_id"]))


def test_extent_outside_the_segments(patient: Patient) -> None:
    offset, row = _last_extent(patient)
    patient.set(offset, row, media_offset=64)
    found = patient.diagnose()
    assert signs(found) == {("extent-impossible", patient.two, b"/two")}
    assert found[0].structure == "extent"
    assert found[0].media_offset == 64


def test_extent_over_a_segment_header(patient: Patient) -> None:
    offset, row = _last_extent(patient)
    segment = patient.anatomy.segment_of(int(row["media_offset"]))
    place = patient.anatomy.block.segment_offset(segment) + 64
    patient.set(offset, row, media_offset=place)
    found = patient.diagnose()
    assert signs(found) == {("extent-impossible", patient.two, b"/two")}
    assert found[0].media_offset == place


def test_extent_in_a_metadata_segment(patient: Patient) -> None:
    offset, row = _last_extent(patient)
    image = patient.anatomy.newest.image_segments[0]
    place = patient.anatomy.block.segment_offset(image) + 8192
    patient.set(offset, row, media_offset=place)
    found = patient.diagnose()
    assert signs(found) == {("extent-impossible", patient.two, b"/two")}
    assert "metadata" in found[0].message


def test_extents_that_overlap(patient: Patient) -> None:
    offset, row = _last_extent(patient)
    others = [r for _, r in patient.rows(layout.SECTION_EXTENTS) if int(r["id"]) != int(row["id"])]
    place = int(others[0]["media_offset"]) + 64
    patient.set(offset, row, media_offset=place)
    found = patient.diagnose()
    assert {finding.id for finding in found} == {"extent-overlap"}
    assert found[0].media_offset is not None


@pytest.mark.parametrize(
    "values", [{"id": 0}, {"id": 1 << 60}, {"length": 0}, {"length": 1 << 40}, {"crc_count": 9}]
)
def test_impossible_extents(patient: Patient, values: dict[str, int]) -> None:
    offset, row = _last_extent(patient)
    patient.set(offset, row, **values)
    found = [finding for finding in patient.diagnose() if finding.pass_id == 7]
    assert {finding.id for finding in found} == {"extent-impossible"}


# --- 8: namespace ---------------------------------------------------------------------------


def _rename(patient: Patient, ino: int, name: bytes) -> None:
    _, row = patient.row_of(layout.SECTION_NAMES, ino=ino)
    (strings,) = [
        p
        for p in patient.anatomy.image_pieces(patient.anatomy.newest)
        if p.index == layout.SECTION_STRINGS
    ]
    patient.damage.write(strings.offset + int(row["name_offset"]), name)


@pytest.mark.parametrize("name", [b"t/o", b"t\0o"])
def test_forbidden_characters(patient: Patient, name: bytes) -> None:
    _rename(patient, patient.two, name)
    found = patient.diagnose()
    assert [(f.id, f.ino) for f in found] == [("name-impossible", patient.two)]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"name_bytes": 0}, "name-impossible"),
        ({"name_bytes": 300}, "name-impossible"),
        ({"name_offset": 1 << 60}, "name-impossible"),
    ],
)
def test_names_that_cannot_be(patient: Patient, values: dict[str, int], kind: str) -> None:
    offset, row = patient.row_of(layout.SECTION_NAMES, ino=patient.two)
    patient.set(offset, row, **values)
    assert [(f.id, f.ino) for f in patient.diagnose()] == [(kind, patient.two)]


def test_a_name_that_appears_twice(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_NAMES, ino=patient.link)
    _, other = patient.row_of(layout.SECTION_NAMES, ino=patient.two)
    text = {name: int(other[name]) for name in ("name_offset", "name_bytes")}
    patient.set(offset, row, **text)
    assert {f.id for f in patient.diagnose()} == {"name-impossible"}


def test_a_name_of_an_inode_that_does_not_exist(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_NAMES, ino=patient.one)
    patient.set(offset, row, ino=777)
    assert signs(patient.diagnose()) == {
        ("name-dangling", patient.b, b"/a/b"),
        ("inode-nameless", patient.one, None),
    }


def test_a_name_in_something_that_is_no_directory(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_NAMES, ino=patient.one)
    patient.set(offset, row, parent=patient.two)
    assert signs(patient.diagnose()) == {
        ("name-dangling", patient.one, None),
        ("inode-nameless", patient.one, None),
    }


def test_directories_that_form_a_loop(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_NAMES, ino=patient.a)
    patient.set(offset, row, parent=patient.b)
    found = patient.diagnose()
    assert {f.id for f in found} == {"directory-unreachable"}
    assert len(found) == 1
    assert found[0].ino in (patient.a, patient.b)


def test_a_directory_with_two_names(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_NAMES, ino=patient.two)
    patient.set(offset, row, ino=patient.b)
    assert {(f.id, f.ino) for f in patient.diagnose()} == {
        ("name-impossible", patient.b),
        ("inode-nameless", patient.two),
    }


@pytest.mark.parametrize("values", [{"mode": 0}, {"flags": 128}, {"size": 1 << 60}])
def test_impossible_inodes(patient: Patient, values: dict[str, int]) -> None:
    offset, row = patient.row_of(layout.SECTION_INODES, ino=patient.two)
    patient.set(offset, row, **values)
    found = [f for f in patient.diagnose() if f.pass_id == 8]
    assert signs(found) == {("inode-impossible", patient.two, b"/two")}


def test_an_inode_that_appears_twice(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_INODES, ino=patient.link)
    patient.set(offset, row, ino=patient.a)
    assert ("inode-impossible", patient.a, b"/a") in signs(patient.diagnose())


def test_content_of_something_that_is_no_file(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_INODES, ino=patient.two)
    patient.set(offset, row, mode=0o040755)
    assert ("inode-impossible", patient.two, b"/two") in signs(patient.diagnose())


def test_a_root_directory_that_is_a_file(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_INODES, ino=1)
    patient.set(offset, row, mode=0o100644)
    assert ("inode-impossible", 1) in {(f.id, f.ino) for f in patient.diagnose()}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (layout.SECTION_XATTRS, {"ino": 777}),
        (layout.SECTION_XATTRS, {"name_bytes": 0}),
        (layout.SECTION_XATTRS, {"string_offset": 1 << 50}),
        (layout.SECTION_SYMLINKS, {"value_bytes": 0}),
        (layout.SECTION_SYMLINKS, {"name_bytes": 1}),
    ],
)
def test_impossible_attributes(patient: Patient, kind: int, values: dict[str, int]) -> None:
    ((offset, row),) = patient.rows(kind)
    patient.set(offset, row, **values)
    assert {f.id for f in patient.diagnose()} == {"attribute-impossible"}


# --- 9: references --------------------------------------------------------------------------


def _reference(patient: Patient, ino: int) -> tuple[int, np.void]:
    position = 0
    for _, row in patient.rows(layout.SECTION_INODES):
        if int(row["ino"]) == ino:
            return patient.rows(layout.SECTION_REFS)[position]
        position += int(row["ref_count"]) + int(row["aside_ref_count"])
    raise AssertionError(f"no inode {ino}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: {"extent_id": 1 << 40}, "does not exist"),
        (lambda _: {"extent_offset": 1 << 20}, "beyond its extent"),
        (lambda row: {"length": int(row["length"]) + 64}, "beyond"),
        (lambda _: {"length": 0}, "impossible"),
        (lambda _: {"file_offset": (1 << 64) - 10}, "impossible"),
        (lambda _: {"file_offset": 100}, "beyond the end of the file"),
    ],
)
def test_impossible_references(
    patient: Patient, change: Callable[[np.void], dict[str, int]], words: str
) -> None:
    offset, row = _reference(patient, patient.two)
    patient.set(offset, row, **change(row))
    found = patient.diagnose()
    assert signs(found) == {("reference-impossible", patient.two, b"/two")}
    assert found[0].structure == "reference"
    assert words in found[0].message


def test_reference_counts_that_do_not_add_up(patient: Patient) -> None:
    offset, row = patient.row_of(layout.SECTION_INODES, ino=patient.two)
    patient.set(offset, row, ref_count=1 << 63)
    found = [f for f in patient.diagnose() if f.pass_id == 9]
    assert {f.id for f in found} == {"reference-impossible"}
    assert "claim" in found[0].message
