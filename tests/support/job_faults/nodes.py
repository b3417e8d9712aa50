"""The nodes of a job: a directory each, of a mounted store or not, and what is done to them. What a
power cut leaves is made of what ``preloaded.c`` and ``preloaded_lines.c`` keep.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np

from cxlfs.control import discovery, mountinfo
from cxlfs.media import open_media
from cxlfs.store import Store
from tests.support.job_faults.ranks import YEAR_SECONDS
from tests.support.mount import MIB, Workplace, wait_for_exit
from tests.support.repository import ROOT

STORE_BYTES = 64 * MIB
WORD_BYTES, LINE_BYTES, SECTOR_BYTES, PAGE_BYTES = 8, 64, 512, 4096
_SHIM = Path(__file__).with_name("preloaded.c")
_SHIM_OF_LINES = Path(__file__).with_name("preloaded_lines.c")
_FORGETS = "CXLFS_TEST_MEDIUM_FORGETS"


class Beside(enum.Enum):
    """What is preloaded into daemons, which begin with a Python of their own then."""

    NOTHING = enum.auto()
    KEPT = enum.auto()
    """What a power cut leaves."""
    FORGOTTEN = enum.auto()
    """The same of a medium that lies."""
    CLOCK = enum.auto()
    """A clock that can be set back."""
    LINES_KEPT = enum.auto()
    """What a power cut leaves of a medium that is written back by line; beside ranks, too."""
    LINES_FORGOTTEN = enum.auto()

    @property
    def keeps(self) -> bool:
        return self is not Beside.NOTHING and self is not Beside.CLOCK

    @property
    def is_of_lines(self) -> bool:
        return self in {Beside.LINES_KEPT, Beside.LINES_FORGOTTEN}


class Nodes:
    """``places``: a store each; or none, and ``count`` directories."""

    def __init__(
        self, root: Path, places: list[Workplace], count: int, beside: Beside = Beside.NOTHING
    ) -> None:
        self.root = root
        self.places = places
        self._environment = _environment(root, beside)
        self._keeps = beside.keeps
        tops = [place.mountpoint for place in places] or [root] * count
        self.roots = [top / f"node{number}" for number, top in enumerate(tops)]
        for place in places:
            place.starts_afresh = bool(self._environment)
            self._keep_all(place)
        self.mount_again()

    def mount_again(self) -> None:
        """Those that are not."""
        for place in self.places:
            if not place.is_mounted or mountinfo.is_dead(str(place.mountpoint)):
                with _environment_of(place, self._environment):
                    place.mount()
                place.ends_clean = True
        for root in self.roots:
            root.mkdir(exist_ok=True)

    def daemon(self, node: int) -> int:
        """Its process."""
        with _environment_of(self.places[node]):
            return self.places[node].daemon_pid

    def kill_daemon(self, node: int, pid: int | None = None) -> None:
        """``pid``: of one that stands still, and does not say."""
        pid = pid or self.daemon(node)
        watch = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(watch)
        self.places[node].ends_clean = False

    def set_clock_back(self, node: int) -> None:
        """From its daemon's next start on, which is now."""
        with _environment_of(self.places[node]):
            self.places[node].unmount()
        self._environment["CXLFS_TEST_CLOCK_BACK_SECONDS"] = str(YEAR_SECONDS)
        self.mount_again()
        del self._environment["CXLFS_TEST_CLOCK_BACK_SECONDS"]

    # --- what becomes of a store ------------------------------------------------------------

    def empty(self, node: int) -> None:
        shutil.rmtree(self.roots[node])
        self.roots[node].mkdir()

    def lose(self, node: int) -> None:
        """Its daemon dies, and the store is a new one."""
        if not self.places:
            self.empty(node)
            return
        place = self.places[node]
        self.kill_daemon(node)
        media = open_media(place.source)
        try:
            Store.format(media)
        finally:
            media.close()
        self._keep_all(place)
        self.mount_again()

    def fill(self, node: int) -> None:
        place = self.places[node]
        place.announced.append("no-space")
        with contextlib.suppress(OSError), (place.mountpoint / "filler").open("wb") as file:
            while True:
                file.write(bytes(MIB))
                file.flush()
                os.fsync(file.fileno())

    def make_room(self) -> None:
        for place in self.places:
            (place.mountpoint / "filler").unlink(missing_ok=True)

    # --- power ------------------------------------------------------------------------------

    def cut_power(self, cut: Sequence[int], ranks: Sequence[int], numbers: random.Random) -> None:
        """Of these nodes, on which these processes run. They stand still before anything of them is
        killed, so that nothing is done, or answered, behind the cut.
        """
        daemons = {node: self.daemon(node) for node in cut} if self.places else {}
        for pid in daemons.values():
            os.kill(pid, signal.SIGSTOP)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        for node, pid in daemons.items():
            place = self.places[node]
            image = image_of(place.source, numbers) if self._keeps else None
            self.kill_daemon(node, pid)
            if image is not None:
                with place.source.open("r+b") as file:
                    file.write(image)
                self._keep_all(place)

    def _keep_all(self, place: Workplace) -> None:
        """What is there, nobody writes to, and is there after a power cut."""
        if self._keeps:
            shutil.copyfile(place.source, _durable(place.source))
            place.source.with_name(f"{place.source.name}.lines").unlink(missing_ok=True)


def _durable(source: Path) -> Path:
    return source.with_name(f"{source.name}.durable")


def image_of(source: Path, numbers: random.Random) -> bytes:
    """What a power cut leaves of it: what is sure to be durable; and of what was stored beside it
    nothing, all, or some pages, sectors, lines or words.
    """
    stored = np.fromfile(source, dtype=np.uint64)
    image = np.fromfile(_durable(source), dtype=np.uint64)
    differing = np.flatnonzero(stored != image)
    units = [0, 0, WORD_BYTES, LINE_BYTES, SECTOR_BYTES, PAGE_BYTES, source.stat().st_size]
    unit_bytes = numbers.choice(units)
    if unit_bytes:
        touched, of_unit = np.unique(differing * WORD_BYTES // unit_bytes, return_inverse=True)
        share = 1.0 if unit_bytes > PAGE_BYTES else numbers.choice([0.1, 0.5, 0.9])
        left = np.array([numbers.random() < share for _ in touched], dtype=bool)
        differing = differing[left[of_unit]]
        image[differing] = stored[differing]
    return image.tobytes()


@contextlib.contextmanager
def _environment_of(place: Workplace, more: dict[str, str] | None = None) -> Iterator[None]:
    """Where its daemon is found: each workplace looks for its own in a directory of its own."""
    own = {discovery.ENVIRONMENT_OVERRIDE: str(place.runtime)}
    with mock.patch.dict(os.environ, own | (more or {})):
        yield


def _environment(root: Path, beside: Beside) -> dict[str, str]:
    if beside is Beside.NOTHING or beside.is_of_lines:
        return {}
    found = {"LD_PRELOAD": str(_compiled(_SHIM, root))}
    if beside is Beside.FORGOTTEN:
        found[_FORGETS] = "1"
    return found


def environment_of_lines(root: Path, beside: Beside) -> dict[str, str]:
    """For the process that forks ranks, and all that it begins."""
    found = {"LD_PRELOAD": str(_compiled(_SHIM_OF_LINES, root))}
    if beside is Beside.LINES_FORGOTTEN:
        found[_FORGETS] = "1"
    return found


def _compiled(source: Path, root: Path) -> Path:
    library = root / f"{source.stem}.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, "-o", library, source, "-lpthread"], check=True)
    return library
