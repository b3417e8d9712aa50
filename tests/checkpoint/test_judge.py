"""Is an overwritten file torn? As its bytes and those of the version before say."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pickle
import zipfile
from collections.abc import Callable

import numpy as np
import pytest

from cxlfs.checkpoint.formats.base import HEAD_BYTES
from cxlfs.checkpoint.judge import (
    Evidence,
    Verdict,
    is_judged,
    is_judged_new,
    is_unread,
    judge,
    looks_alike,
    shows_format,
)
from cxlfs.checkpoint.limits import READ_BYTES

NAMES = ("first", "second", "third")
TORN = {Evidence.STRONG, Evidence.BEGINNING, Evidence.WEAK}


@dataclasses.dataclass
class Bytes:
    """A content in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def fetch(self, offset: int, length: int) -> bytes:
        assert length <= READ_BYTES
        assert offset + length <= len(self.data)
        return self.data[offset : offset + length]


class Broken(Bytes):
    """One that the media have damaged."""

    def fetch(self, offset: int, length: int) -> bytes:
        raise OSError(f"{length} bytes at {offset}")


def judged(name: str, new: bytes, old: bytes) -> Verdict:
    return judge(name, Bytes(new), Bytes(old))


# --- savers ---------------------------------------------------------------------------------


def npz(names: tuple[str, ...] = NAMES, *, compressed: bool = False) -> bytes:
    file = io.BytesIO()
    save = np.savez_compressed if compressed else np.savez
    save(file, allow_pickle=False, **{name: np.arange(300.0) for name in names})
    return file.getvalue()


def npy(_names: tuple[str, ...] = NAMES) -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(1000.0))
    return file.getvalue()


def safetensors(names: tuple[str, ...] = NAMES) -> bytes:
    from safetensors.numpy import save

    return bytes(save({name: np.arange(300.0) for name in names}))


def hdf5(names: tuple[str, ...] = NAMES) -> bytes:
    import h5py  # type: ignore[import-untyped]

    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        for name in names:
            opened[name] = np.arange(300.0)
    return file.getvalue()


def pickled(names: tuple[str, ...] = NAMES) -> bytes:
    return pickle.dumps({name: list(range(100)) for name in names})


def jsons(names: tuple[str, ...] = NAMES) -> bytes:
    return json.dumps({name: [1, 2, 3] for name in names}, indent=2).encode()


Save = Callable[..., bytes]
SAVERS: dict[str, Save] = {
    "a.npz": npz,
    "a.npy": npy,
    "a.safetensors": safetensors,
    "a.h5": hdf5,
    "a.pkl": pickled,
    "a.json": jsons,
}


@pytest.fixture(params=list(SAVERS))
def name(request: pytest.FixtureRequest) -> str:
    chosen = request.param
    assert isinstance(chosen, str)
    if chosen.endswith(".safetensors"):
        pytest.importorskip("safetensors")
    if chosen.endswith(".h5"):
        pytest.importorskip("h5py")
    return chosen


# --- verdicts -------------------------------------------------------------------------------


def test_whole_content_is_never_torn(name: str) -> None:
    data = SAVERS[name]()
    assert judged(name, data, data).evidence is Evidence.NONE


def test_content_that_is_cut_anywhere_is_torn(name: str) -> None:
    data = SAVERS[name]()
    for length in {*range(0, len(data), max(1, len(data) // 300)), *range(20), len(data) - 1}:
        verdict = judged(name, data[:length], data)
        assert verdict.evidence is Evidence.STRONG, (length, verdict)
        assert verdict.reason


@pytest.mark.parametrize("saver", ["a.npz", "a.pkl", "a.json"])
def test_zeros_behind_a_cut_are_torn(saver: str) -> None:
    """A file that was given its length first, and its bytes in part."""
    data = SAVERS[saver]()
    for length in range(0, len(data) - 20, max(1, len(data) // 100)):
        new = data[:length] + bytes(len(data) - length)
        assert judged(saver, new, data).evidence in TORN, length


@pytest.mark.parametrize("saver", ["a.npz", "a.safetensors", "a.h5"])
def test_names_that_are_missing_are_weak_evidence(saver: str) -> None:
    if saver.endswith((".safetensors", ".h5")):
        pytest.importorskip("safetensors" if saver.endswith("s") else "h5py")
    save = SAVERS[saver]
    for kept in ((1,), (1, 2), (0, 2)):
        names = [NAMES[number] for number in kept]
        verdict = judged(saver, save(names), save())
        assert verdict.evidence is Evidence.WEAK
        assert any(name in verdict.reason for name in set(NAMES) - set(names))


@pytest.mark.parametrize(
    ("saver", "evidence"),
    [
        ("a.npz", Evidence.BEGINNING),
        ("a.h5", Evidence.BEGINNING),
        ("a.safetensors", Evidence.WEAK),
    ],
)
def test_the_beginning_of_a_save(saver: str, evidence: Evidence) -> None:
    """Formats that take tensors one by one are whole wherever the saver ends. The others cannot be
    whole without the last one: fewer tensors are meant.
    """
    if saver.endswith((".safetensors", ".h5")):
        pytest.importorskip("safetensors" if saver.endswith("s") else "h5py")
    save = SAVERS[saver]
    for count in (1, 2):
        verdict = judged(saver, save(NAMES[:count]), save())
        assert verdict.evidence is evidence
        assert NAMES[count] in verdict.reason


def hdf5_with(attributes: tuple[str, ...], **options: object) -> bytes:
    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w", **options) as opened:
        opened["group/array"] = np.arange(300.0)
        for number, attribute in enumerate(attributes):
            opened.attrs[attribute] = number
            opened["group/array"].attrs[attribute * 20] = "a text"
    return file.getvalue()


@pytest.mark.parametrize("count", [0, 1, 11])
def test_attributes_that_a_saver_sets_last(count: int) -> None:
    pytest.importorskip("h5py")
    all_names = tuple(f"name {number}" for number in range(12))
    old = hdf5_with(all_names)
    verdict = judged("a.h5", hdf5_with(all_names[:count]), old)
    assert verdict.evidence is Evidence.BEGINNING
    assert "@name" in verdict.reason
    assert judged("a.h5", hdf5_with(all_names), old).evidence is Evidence.NONE
    assert judged("a.h5", hdf5_with(("other",)), old).evidence is Evidence.NONE


def test_what_is_not_listed_is_not_missed() -> None:
    """A file of a later version, whose names are not read, replaces one of an earlier one."""
    pytest.importorskip("h5py")
    old = hdf5_with(("step",))
    assert judged("a.h5", hdf5_with(("step",), libver="latest"), old).evidence is Evidence.NONE
    assert judged("a.json", b"[1, 2]", jsons()).evidence is Evidence.NONE


def test_the_first_tensors_with_another_shape() -> None:
    """Another model: fewer names are meant."""
    other = io.BytesIO()
    np.savez(other, **{NAMES[0]: np.arange(7.0)})
    assert judged("a.npz", other.getvalue(), npz()).evidence is Evidence.WEAK


@pytest.mark.parametrize("saver", ["a.npz", "a.safetensors"])
def test_other_names_are_meant(saver: str) -> None:
    save = SAVERS[saver]
    assert judged(saver, save(("first", "other")), save()).evidence is Evidence.NONE
    assert judged(saver, save((*NAMES, "more")), save()).evidence is Evidence.NONE


def interrupted_npz(after: int) -> bytes:
    """As ``np.savez`` leaves it when an exception comes while it writes array ``after``."""
    file = io.BytesIO()
    with contextlib.suppress(KeyboardInterrupt), zipfile.ZipFile(file, "w") as archive:
        for number, each in enumerate(NAMES):
            with archive.open(f"{each}.npy", "w") as part:
                if number == after:
                    part.write(b"\x93NUMPY"[:after])
                    raise KeyboardInterrupt
                np.lib.format.write_array(part, np.arange(300.0))
    return file.getvalue()


@pytest.mark.parametrize("after", range(3))
def test_an_exception_in_the_middle_of_an_archive(after: int) -> None:
    """It is ended in good order, whatever is missing in it."""
    assert judged("a.npz", interrupted_npz(after), npz()).evidence in TORN


def test_compressed_archives() -> None:
    old = npz(compressed=True)
    assert judged("a.npz", npz(NAMES[:2], compressed=True), old).evidence is Evidence.BEGINNING
    assert judged("a.npz", npz(NAMES[1:], compressed=True), old).evidence is Evidence.WEAK
    assert judged("a.npz", old[:-30], old).evidence is Evidence.STRONG


def test_another_format_under_the_same_name() -> None:
    assert judged("a.npz", npy(), npz()).evidence is Evidence.NONE
    assert judged("model.bin", b"text, and no format at all", npz()).evidence is not Evidence.STRONG


@pytest.mark.parametrize(("name", "old"), [("a.txt", b"text"), ("a.log", npy()[:50]), ("a", b"")])
def test_what_nobody_knows_is_never_torn(name: str, old: bytes) -> None:
    assert judged(name, b"", old).evidence is Evidence.UNKNOWN


def test_nothing_goes_back_to_a_version_that_is_torn_itself(name: str) -> None:
    data = SAVERS[name]()
    assert judged(name, data[:10], data[:50]).evidence is Evidence.UNKNOWN


def test_formats_are_known_by_their_beginning() -> None:
    assert is_judged(b"model.npz", npz()[:16])
    assert is_judged(b"state.pkl", pickled()[:16])
    assert is_judged(b"state.json", b"{}")
    assert not is_judged(b"train.log", b"step 1")
    assert not is_judged(b"\xff\xfe", b"")


def test_bytes_that_cannot_be_read_are_not_judged() -> None:
    assert judge("a.npy", Broken(npy()), Bytes(npy())).evidence is Evidence.UNKNOWN
    assert judge("a.npy", Bytes(npy()), Broken(npy())).evidence is Evidence.UNKNOWN


# --- what is judged at all ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1}\n{"b": 2}\n',
        b'{"a": 1, // a comment\n"b": 2}',
        b"\xef\xbb\xbf{}",
        '{"a": "é"}'.encode("latin-1"),
        '{"a": 1}'.encode("utf-16"),
        b"{{ template }}",
    ],
)
def test_text_that_is_no_json_is_not_torn(text: bytes) -> None:
    assert judged("a.json", text, jsons()).evidence is Evidence.UNKNOWN


@pytest.mark.parametrize("length", range(1, 60, 3))
def test_json_that_ends_early_is(length: int) -> None:
    whole = '{"first": [1, 2.5, true, null, "é\\n"], "second": {"a": -1e5}}'.encode()
    assert judged("a.json", whole[:length], whole).evidence is Evidence.STRONG


def torch_zip(archive: str) -> bytes:
    """As far as its first bytes tell it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(f"{archive}/data.pkl", pickle.dumps({"a": 1}, protocol=2))
        opened.writestr(f"{archive}/version", "3\n")
    return file.getvalue()


@pytest.mark.parametrize("name", ["checkpoint.pth.tar", "ckpt-1", "model", "last.model", "a.pt"])
def test_archives_of_torch_are_known_by_content(name: str) -> None:
    whole = torch_zip("a" * 200)
    assert is_judged(name.encode(), whole[:HEAD_BYTES])
    assert judged(name, whole[:-30], whole).evidence is Evidence.STRONG
    assert judged(name, whole, whole).evidence is Evidence.NONE


def test_other_archives_are_not() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("document/content.xml", "<xml/>")
    assert not is_judged(b"a.docx", file.getvalue()[:HEAD_BYTES])


def test_new_files_are_judged_by_content_alone() -> None:
    for name, head in (
        (b"a.json", jsons()),
        (b"a.npy", b"1 2 3"),
        (b"a.h5", b"text"),
        (b"checkpoint_1", b"\x82\xa1a\x01"),
    ):
        assert not is_judged_new(name, head[:HEAD_BYTES])
    assert not is_judged_new(b"a.pkl", pickled()), "a log of pickles begins like one"
    for name, head in ((b"a.npz", npz()), (b"a.npy", npy())):
        assert is_judged_new(name, head[:HEAD_BYTES])
        assert looks_alike(name, head[:HEAD_BYTES], head[:HEAD_BYTES])
        assert not looks_alike(name, b"header " + head[:HEAD_BYTES], head[:HEAD_BYTES])
    assert is_judged_new(b"a.ubj", b"{L")
    assert is_unread(b"a.ubj")
    assert shows_format(b"a.npy")
    assert not shows_format(b"job2")
    assert not shows_format(b"a.ubj")


def test_hdf5_that_readers_follow_while_it_grows() -> None:
    """In SWMR mode it is good wherever its writer ends."""
    h5py = pytest.importorskip("h5py")
    file = io.BytesIO()
    with h5py.File(file, "w", libver="latest") as opened:
        opened.create_dataset("a", (0,), "f4", maxshape=(None,), chunks=(100,))
        opened.swmr_mode = True
        opened["a"].resize((50,))
        opened.flush()
        left = file.getvalue()
    assert judged("a.h5", left, file.getvalue()).evidence is Evidence.UNKNOWN
