"""Copies between directories of a mounted store: sent as they lie there, stored directly, and read
back from the medium; damage on the way, or at either end, is found.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
import random
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from cxlfs import client
from cxlfs.errors import JobFilesError, JobLinkError
from cxlfs.job import copying, files, incoming, outgoing, pieces
from cxlfs.job.files import Manifest, Medium
from cxlfs.job.protocol import Attempt
from tests.support import job_copy_mutants as mutants
from tests.support.job_links import Switch
from tests.support.job_ranks import SECONDS
from tests.support.mount import MIB, Workplace

pytestmark = pytest.mark.usefixtures("nothing_stays_mapped")

ATTEMPT = Attempt(3, 100, "0123456789abcdef")
SIZES = {"a.pt": 5 * MIB + 4321, "b/small": 70_000, "b/c.pt": 2 * MIB, "empty": 0, "z.pt": 3 * MIB}
LARGE = ("a.pt", "b/c.pt", "z.pt")


class Scene:
    """What rank 1 has in one directory of the store, and rank 0 gets in another one."""

    def __init__(self, place: Workplace, rng: random.Random, *, is_stream: bool) -> None:
        self.place = place
        self.roots = [place.mountpoint / name for name in ("own", "other")]
        self.data = {name: rng.randbytes(size) for name, size in SIZES.items()}
        self.switch = Switch(is_stream=is_stream)
        for root in self.roots:
            root.mkdir()
        staged = files.begin(self.roots[0], ATTEMPT, 1)
        for name, data in self.data.items():
            (staged / name).parent.mkdir(exist_ok=True)
            with client.open(staged / name, "wb") as file:
                file.write(data)
        shards = files.measure(staged)
        self.digest = files.seal(
            self.roots[0], Manifest(ATTEMPT, 1, 2, "node", "store", Medium(), shards)
        )
        self.source, self.copy = (files.rank_path(root, ATTEMPT, 1) for root in self.roots)

    def carry(self) -> tuple[BaseException | None, BaseException | None]:
        """What the sender, and what the receiver ended with."""
        wanted = copying.Wanted(ATTEMPT, 1, 2, self.digest)

        def end(own: int) -> BaseException | None:
            link, error = self.switch.link(own, 1 - own, "copy", SECONDS), None
            try:
                if own:
                    copying.receive(link, self.roots[1], wanted)
                else:
                    copying.send_sealed(link, self.source, self.digest)
            except (JobFilesError, JobLinkError, OSError) as caught:
                error = caught
            link.close(is_done=error is None)
            return error

        with concurrent.futures.ThreadPoolExecutor(2) as ends:
            sent, received = ends.map(end, range(2))
        return sent, received

    def places(self, pattern: bytes) -> set[int]:
        """Where on the medium it is."""
        content = self.place.source.read_bytes()
        return {found.start() for found in re.finditer(re.escape(pattern), content)}

    def flip(self, place: int) -> None:
        """One bit of the medium: whoever compares it tells the daemon, which says so."""
        self.place.announced.append("checksum-error")
        self.place.damaged_history = True
        with self.place.source.open("r+b") as medium:
            medium.seek(place)
            (byte,) = medium.read(1)
            medium.seek(place)
            medium.write(bytes([byte ^ 1]))

    def assert_nothing_there(self) -> None:
        assert list(self.roots[1].glob("step-*/*")) == []


@pytest.fixture(params=["pieces", "stream"])
def scene(
    request: pytest.FixtureRequest,
    place: Workplace,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    monkeypatch.setattr(pieces, "PIECE_BYTES", MIB)
    monkeypatch.setattr(incoming, "STRETCH_BYTES", MIB)
    return Scene(place, rng, is_stream=request.param == "stream")


def test_a_copy_goes_from_pages_to_pages(scene: Scene) -> None:
    before = client.counts()
    assert scene.carry() == (None, None)
    after = client.counts()
    large_bytes = sum(SIZES[name] for name in LARGE)
    assert after.mapped_bytes - before.mapped_bytes == 2 * large_bytes, "sent, and read back"
    assert after.direct_bytes - before.direct_bytes > large_bytes - 3 * MIB
    for name, data in scene.data.items():
        assert (scene.copy / name).read_bytes() == data
        assert files.promised_crc32c(scene.copy / name) is not None
    assert files.verify(scene.roots[1], ATTEMPT, 1, scene.digest) == scene.copy


@pytest.mark.parametrize("at", ["send", "receive", "read back"])
def test_where_nothing_goes_directly_it_is_copied_as_anywhere(
    scene: Scene, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if at == "receive":
        monkeypatch.setattr(incoming, "DirectFile", refuse)
    else:
        module = outgoing if at == "send" else incoming
        monkeypatch.setattr(module, "client", types.SimpleNamespace(StoredFile=refuse))
    assert scene.carry() == (None, None)
    for name, data in scene.data.items():
        assert (scene.copy / name).read_bytes() == data


def damaged_on_the_way(scene: Scene) -> None:
    def tap(_name: str, number: int, data: bytes) -> bytes:
        if len(data) == MIB and number > 4:
            scene.switch.tap = lambda _name, _number, data: data
            return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        return data

    scene.switch.tap = tap
    sent, received = scene.carry()
    assert isinstance(sent, JobLinkError)
    assert isinstance(received, JobFilesError)
    assert "on arrival" in str(sent)
    scene.assert_nothing_there()


def damaged_at_the_source(scene: Scene) -> None:
    middle = 3 * MIB // 2  # of what is sent as it lies
    (place,) = scene.places(scene.data["b/c.pt"][middle : middle + 32])
    scene.flip(place)
    sent, received = scene.carry()
    scene.flip(place)
    assert isinstance(received, JobFilesError)
    scene.assert_nothing_there()
    assert isinstance(sent, OSError)
    assert (sent.errno, Path(str(sent.filename)).name) == (errno.EIO, "c.pt")


def damaged_where_it_was_stored(scene: Scene) -> None:
    """Behind its sums, and before it is read back."""
    real, pattern = incoming._sync, scene.data["a.pt"][2 * MIB + 5000 : 2 * MIB + 5032]
    before = scene.places(pattern)

    def sync(path: Path) -> None:
        real(path)
        if path.name == "a.pt":
            (place,) = scene.places(pattern) - before
            scene.flip(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incoming, "_sync", sync)
        _, received = scene.carry()
    assert isinstance(received, OSError)
    assert (received.errno, Path(str(received.filename)).name) == (errno.EIO, "a.pt")
    scene.assert_nothing_there()


DAMAGES = [damaged_on_the_way, damaged_at_the_source, damaged_where_it_was_stored]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(scene: Scene, damage: Callable[[Scene], None]) -> None:
    damage(scene)


@pytest.mark.parametrize(
    ("mistake", "damage"),
    [
        (mutants.pages_are_not_compared, damaged_where_it_was_stored),
        (mutants.sums_are_not_those_of_the_manifest, damaged_on_the_way),
        (mutants.nobody_looks_whose_fault_it_was, damaged_at_the_source),
    ],
)
def test_that_a_planted_mistake_is_found(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    damage: Callable[[Scene], None],
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        damage(scene)
    shutil.rmtree(scene.roots[1])
