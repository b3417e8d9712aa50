"""The tour of README.md, command by command: each prints what stands there, but for its numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from cxlfs.media.room import VOLATILE_TEXT
from tests.support.mount import Workplace
from tests.support.repository import ROOT

TITLE, NEXT = "## A five-minute tour", "`scripts/demo` goes"
MOUNTPOINT, FOLDER = "/mnt/cxlckpt", "/var/tmp/tour"  # noqa: S108  the reader's, replaced here
PROMPT = "$ "
KILLED = "Killed"  # as a shell with a terminal says it
SAVED_BYTES = 12_000_000
# Smaller than for the reader; torch is not needed to save something.
SMALLER = {
    "--size 2G": "--size 128M",
    "60_000_000": "6_000_000",
    'import torch; torch.save(torch.rand(25_000_000), "/mnt/cxlckpt/model.pt")': (
        'import os, pickle, zipfile; file = zipfile.ZipFile("/mnt/cxlckpt/model.pt", "w"); '
        'file.writestr("archive/data.pkl", pickle.dumps({}, 2)); '
        'file.writestr("archive/version", "3"); '
        f'file.writestr("archive/data/0", os.urandom({SAVED_BYTES})); file.close()'
    ),
}
DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


def steps() -> list[tuple[str, list[str]]]:
    """Each command of the tour with the lines that it prints."""
    text = (ROOT / "README.md").read_text()
    tour = text[text.index(TITLE) : text.index(NEXT)]
    found: list[tuple[str, list[str]]] = []
    for line in re.findall(r"^ {4}(.*)$", tour, re.MULTILINE):
        if line.startswith(PROMPT):
            found.append((line.removeprefix(PROMPT), []))
        else:
            found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """The line without what differs from store to store, and from run to run."""
    line = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", line)
    line = re.sub(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b", "UUID", line)
    line = re.sub(r"\b0x[0-9a-f]+\b|\d+(\.\d+)?", "N", DIGEST.sub("DIGEST", line))
    line = re.sub(r"N (KiB|MiB|GiB)\b", "SIZE", line)
    # Which pages a file gets is the file system's affair, and older kernels do not tell.
    line = re.sub("page size unknown|SIZE pages( for N% of what is mapped)?", "PAGES", line)
    return " ".join(line.split())


def test_every_command_prints_what_the_readme_says(unmounted: Workplace) -> None:
    place = unmounted
    folder = place.root / "tour"
    folder.mkdir()
    paths = {MOUNTPOINT: str(place.mountpoint), FOLDER: str(folder)}
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
    }
    digests: dict[str, str] = {}
    for command, said in steps():
        line = command
        for old, new in {**SMALLER, **paths}.items():
            line = line.replace(old, new)
        if line.startswith("cat "):
            text = "\n".join([*said, ""])
            for old, new in {**SMALLER, **paths}.items():
                text = text.replace(old, new)
            (folder / line.removeprefix("cat ")).write_text(text)
            continue
        if line.startswith("kill -KILL "):
            place.kill_daemon()
            continue
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed = done.stdout
        for new, old in ((new, old) for old, new in paths.items()):
            printed = printed.replace(new, old)
        lines = [one for one in printed.splitlines() if VOLATILE_TEXT not in one]
        if said == [KILLED]:
            assert done.returncode in (-9, 137)
            continue
        assert [shape(one) for one in lines] == [shape(one) for one in said], command
        for promised, got in zip("\n".join(said).split(), "\n".join(lines).split(), strict=False):
            if DIGEST.fullmatch(promised):
                assert digests.setdefault(promised, got) == got, "another version of the file"
    assert len(digests) == 1


def test_what_is_compared_is_more_than_words() -> None:
    assert shape("space: 95.4 MiB used (4%)") == shape("   space:   1.2 GiB used (31%)")
    assert shape("msync, 4.0 KiB pages") == shape("msync, page size unknown") != shape("msync")
    assert shape("1 finding") != shape("ok")
    assert len(steps()) >= 20
