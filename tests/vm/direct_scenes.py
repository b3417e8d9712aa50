"""Programs that store, read and map files of a mount by themselves, on emulated persistent memory.

Each scene judges by itself, unlike the rest of the guest: it compares every byte, and raises what
is wrong. What it counted goes to the host as facts.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cxlfs import client
from cxlfs.control.client import control_request, find_daemons
from tests.vm.direct_programs import MIB
from tests.vm.ledger import content

SIZE_MIB = 24
PROGRAM = "tests.vm.direct_programs"
EXIT_IN_USE = 11
SECONDS_MAX = 60
_PAGEMAP_SCAN = 3 << 30 | 96 << 16 | ord("f") << 8 | 16
_PRESENT, _HUGE = 1 << 3, 1 << 6
_ROWS = 1 << 16


class SceneError(Exception):
    pass


def require(truth: object, words: str) -> None:
    if not truth:
        raise SceneError(words)


class Pages(NamedTuple):
    """Of the source, in bytes, as one process has it mapped."""

    present: int
    huge: int

    @property
    def share(self) -> float:
        return round(self.huge / self.present, 3) if self.present else 0.0


def pages_of(process: int | str, source: str) -> Pages:
    """As the page tables say, all of them."""
    rows = (ctypes.c_uint64 * (3 * _ROWS))()
    present = huge = 0
    with Path(f"/proc/{process}/pagemap").open("rb") as pagemap:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            words = line.split(maxsplit=5)
            if len(words) < 6 or words[5] != source:
                continue
            start, end = (int(word, 16) for word in words[0].split("-"))
            where = ctypes.addressof(rows)
            shown = _PRESENT, 0, _PRESENT | _HUGE
            argument = bytearray(
                struct.pack("=12Q", 96, 0, start, end, 0, where, _ROWS, 0, 0, *shown)
            )
            for row in range(fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)):
                first, last, kind = rows[3 * row : 3 * row + 3]
                present += last - first
                huge += last - first if kind & _HUGE else 0
    return Pages(present, huge)


class _Kept(logging.Handler):
    """What was logged, in a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


class Scenes:
    """``run`` runs a command of cxlfs, with the exit status that is expected."""

    def __init__(
        self, mount_point: Path, source: str, run: Callable[..., str], tell: Callable[..., None]
    ) -> None:
        self._root, self._source, self._run, self._tell = mount_point, source, run, tell
        self._logged: list[str] = []
        self._is_small = False
        log = logging.getLogger("cxlfs.client")
        log.setLevel(logging.INFO)
        log.addHandler(_Kept(self._logged))

    def play(self) -> None:
        """On the device."""
        kills = self.killed_writer, self.killed_daemon
        self._play(self.writers, self.readers, self.unchanged_programs, self.pages, *kills)

    def play_in_memory(self) -> None:
        """On a store that the kernel keeps in large pages of memory. Its segments may be too small
        for one.
        """
        self._is_small = True
        self._play(self.writers, self.readers, self.unchanged_programs, self.pages)

    def _play(self, *scenes: Callable[[], dict[str, Any]]) -> None:
        for scene in scenes:
            began = time.monotonic()
            facts = scene()
            seconds = round(time.monotonic() - began, 1)
            self._tell(scene.__name__, {**facts, "seconds": seconds})

    # --- what scenes use --------------------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        for message in control_request(str(self._root), "status"):
            return message
        raise SceneError("no status")

    def _daemon(self) -> int:
        return find_daemons(str(self._root))[0][1].pid

    def _start(self, role: str, *words: object, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", PROGRAM, role, *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)

    def _answer(self, process: subprocess.Popen[str], *, line: str = "") -> dict[str, Any]:
        if line and process.stdin is not None:
            process.stdin.write(line)
            process.stdin.flush()
        require(process.stdout is not None, "no pipe")
        said = process.stdout.readline() if process.stdout is not None else ""
        require(said, f"{process.args!r} said nothing, and ended with {process.poll()}")
        return dict(json.loads(said))

    def _compare(self, name: str, mib: int = SIZE_MIB) -> None:
        """As the kernel reads it."""
        require((self._root / name).read_bytes() == content(name, mib * MIB), f"{name} is wrong")

    def _until(self, words: str, is_so: Callable[[dict[str, Any]], bool]) -> float:
        """Seconds until status says so."""
        began = time.monotonic()
        while not is_so(direct := self._status()["direct"]):
            if time.monotonic() > began + SECONDS_MAX:
                raise SceneError(f"not in {SECONDS_MAX} s: {words}: {direct}")
            time.sleep(0.1)
        return round(time.monotonic() - began, 1)

    # --- scenes -----------------------------------------------------------------------------------

    def writers(self) -> dict[str, Any]:
        """Two processes at a time, one of them with several threads."""
        programs = [
            self._start("write", self._root / name, name, SIZE_MIB, threads)
            for name, threads in (("one", 1), ("many", 3))
        ]
        facts = {}
        for program, name in zip(programs, ("one", "many"), strict=True):
            said = self._answer(program)
            require(program.wait() == 0, f"{name}: exit status {program.returncode}")
            require(said["direct"], f"{name} is written through the kernel: {said['why_not']}")
            facts[name] = said["direct_bytes"]
            require(said["direct_bytes"] == SIZE_MIB * MIB, f"{name}: not all direct: {said}")
            self._compare(name)
        direct = self._status()["direct"]
        require(direct["bytes_written"] == 2 * SIZE_MIB * MIB, f"status: {direct}")
        return facts

    def readers(self) -> dict[str, Any]:
        """The same bytes, directly: read, mapped, and mapped to be written to."""
        data, before = content("many", SIZE_MIB * MIB), client.counts()
        with client.open(self._root / "many") as file:
            pieces = [file.read(MIB) for _ in range(SIZE_MIB)]
        require(b"".join(pieces) == data, "what was read is wrong")
        read_bytes = client.counts().read_bytes - before.read_bytes
        require(read_bytes >= (SIZE_MIB - 2) * MIB, f"read directly: {read_bytes} bytes")
        copied_bytes = {}
        for name in ("one", "many"):
            with client.map(self._root / name, verify="all") as memory:
                require(memory.direct, f"not mapped: {memory.why_not}")
                require(memory.view == content(name, len(data)), f"mapped, {name} is wrong")
                copied_bytes[name] = memory.copied_bytes
        is_mapped = copied_bytes["one"] < len(data)
        require(is_mapped or self._is_small, f"nothing of it is the medium: {copied_bytes}")
        for _ in range(2):
            with client.map(self._root / "one", private=True) as memory:
                require(memory.view == content("one", len(data)), "mapped privately, it is wrong")
                is_private = memory.direct
        self._compare("many")
        told = [line for line in self._logged if "private" in line]
        if not is_private:
            require(memory.why_not == "the medium has no private pages", f"{memory.why_not}")
            require(len(told) == 1, f"said once, why not: {told}")
        return {"read": read_bytes, "copied": copied_bytes, "private": is_private, "told": told}

    def unchanged_programs(self) -> dict[str, Any]:
        """cp, dd and a Python program under ``cxlfs run``."""
        local, report, log = (Path("/run/vm", name) for name in ("source", "report", "log"))
        local.write_bytes(content("local", SIZE_MIB * MIB))
        python = [sys.executable, "-m", PROGRAM, "plain"]
        commands = (
            ["cp", str(local), str(self._root / "copied")],
            ["dd", f"if={self._root / 'copied'}", f"of={self._root / 'dd'}", "bs=1M"],
            [*python, str(local), str(self._root / "plain"), "local", str(SIZE_MIB)],
        )
        facts: dict[str, Any] = {}
        os.environ.update(
            CXLFS_RUN_REPORT=str(report), CXLFS_RUN_LOG=str(log), CXLFS_RUN_FROM="4096"
        )
        for command in commands:
            report.unlink(missing_ok=True)
            log.unlink(missing_ok=True)
            self._run("run", "--", *command)
            direct_bytes = json.loads(report.read_text())["direct_bytes"]
            facts[Path(command[0]).name] = direct_bytes
            require(direct_bytes, f"{command[0]}: nothing was stored directly: {log.read_text()}")
            require(log.read_text().count(": writes directly") == 1, log.read_text())
        for name in ("copied", "dd", "plain"):
            data = content("local", SIZE_MIB * MIB)
            require((self._root / name).read_bytes() == data, f"{name} is wrong")
            (self._root / name).unlink()
        return facts

    def pages(self) -> dict[str, Any]:
        """The page tables of the daemon and of a program that has stored, against status."""
        client.forget()
        status = self._status()
        daemon = pages_of(self._daemon(), self._source)
        with client.open(self._root / "pages", "wb") as file:
            file.write(content("pages", SIZE_MIB * MIB))
            writing = pages_of("self", self._source)
        with client.open(self._root / "pages") as file:
            for _ in range(SIZE_MIB):
                file.read(MIB)
            reading = pages_of("self", self._source)
        self._compare("pages")
        said = status["media"]["huge_page_share"]
        facts = {"said": said, "of": status["media"]["page_size_bytes"]}
        for name, found in (("daemon", daemon), ("writing", writing), ("reading", reading)):
            require(found.present, f"{name}: nothing is mapped")
            facts[name] = found.share
        require(abs(said - daemon.share) < 0.15, f"status says what is not so: {facts}")
        require(min(writing.share, reading.share) >= daemon.share - 0.15, f"small: {facts}")
        return facts

    def killed_writer(self) -> dict[str, Any]:
        """In the middle of its lease: its room comes back."""
        with self._holder("killed") as program:
            require(self._status()["direct"]["files"] == 1, "it has no lease")
            program.kill()
            program.wait()
            seconds = self._until(
                "its room is back", lambda direct: not (direct["files"] or direct["apart_bytes"])
            )
        self._compare("one")
        return {"room_back_seconds": seconds}

    def killed_daemon(self) -> dict[str, Any]:
        """Its programs go on, and the next daemon keeps apart what they can reach."""
        with self._holder("survives") as program:
            os.kill(self._daemon(), signal.SIGKILL)
            client.forget()
            self._mount_again()
            held = self._status()["direct"]["segments_held"]
            require(held, "nothing is held for the program that survived")
            client.forget()
            with client.open(self._root / "after", "wb") as file:
                file.write(content("after", SIZE_MIB * MIB))
                require(file.direct, f"through the kernel: {file.why_not}")
            said = self._answer(program, line="go\n")
            require(said["same"], "the memory of the program that survived has changed")
            self._compare("after")
            self._compare("one")
            client.forget()
            self._run("umount", str(self._root))
            self._run("mkfs", self._source, "--force", expected=EXIT_IN_USE)
            self._run("mount", self._source, str(self._root))
            program.kill()
            program.wait()
            self._until("nothing is held", lambda direct: not direct["segments_held"])
        for name in ("one", "many", "after", "pages"):
            self._compare(name)
        for path in self._root.iterdir():
            path.unlink()
        return {"segments_held": held, "error_of_survivor": said["error"]}

    def _mount_again(self) -> None:
        subprocess.run(["umount", "-l", str(self._root)], check=False)
        self._run("mount", self._source, str(self._root))

    @contextmanager
    def _holder(self, name: str) -> Iterator[subprocess.Popen[str]]:
        """A program that has a lease and a mapped file, until the end at most."""
        words = self._root / name, self._root / "one", "one", SIZE_MIB
        with self._start("hold", *words, stdin=subprocess.PIPE) as program:
            try:
                said = self._answer(program)
                require(said["direct"] and said["mapped"], f"not direct: {said}")
                yield program
            finally:
                program.kill()
