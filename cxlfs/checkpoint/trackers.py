"""Files that name the checkpoint to resume from: ``latest`` and the like, and symbolic links.

Never here: deciding what is good, moving anything (``tidy``).

A tracker that names a checkpoint which is not there any more, or nothing at all, is what makes a
framework's own resume fail although a good checkpoint lies beside it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats import deepspeed, megatron
from cxlfs.checkpoint.model import ProblemError
from cxlfs.checkpoint.place import Place

_NAMES = ("latest", "last_checkpoint")
_MEGATRON = "latest_checkpointed_iteration.txt"
_TENSORFLOW = "checkpoint"
_STATE_BYTES_MAX = 1 << 20
_PATH = re.compile(r'^(?P<key>(?:all_)?model_checkpoint_paths?): "(?P<path>(?:[^"\\]|\\.)*)"$')
_TIMESTAMP = re.compile(r"^all_model_checkpoint_timestamps: .*$")


@dataclasses.dataclass(frozen=True, slots=True)
class Tracker:
    """``name`` says that ``target`` (a name in the same directory; None: it is torn) is newest."""

    name: str
    target: str | None
    is_link: bool = False


def trackers_of(place: Place) -> list[Tracker]:
    """Those in a directory. What cannot be read is left out."""
    found = []
    for name in place.names():
        path = place.path / name
        if path.is_symlink():
            link = sibling_of(path)
            if link is not None:
                found.append(Tracker(name, link, is_link=True))
        elif name in (*_NAMES, _MEGATRON, _TENSORFLOW) and place.is_file(name):
            text = _text_of(place, name)
            if text is not None:
                found.append(Tracker(name, _target_of(name, text)))
    return found


def rewritten(place: Place, tracker: Tracker, target: str, present: set[str]) -> str | None:
    """What the tracker would hold to name ``target``; None: it cannot name such a checkpoint.

    ``present``: prefixes that stay, for a list that TensorFlow keeps.
    """
    if tracker.name == _MEGATRON:
        match = megatron.NAME.fullmatch(target)
        return None if match is None else str(int(match[1]))
    if tracker.name == _TENSORFLOW:
        return _rewritten_state(_text_of(place, tracker.name) or "", target, present)
    if tracker.name == "latest" and not deepspeed.NAME.fullmatch(target):
        torn = tracker.target is None
        return None if torn and not place.is_directory(target) else target
    return target


def sibling_of(path: Path) -> str | None:
    """The name of a sibling that a symbolic link leads to, there or not; None: somewhere else, or
    it is no link.
    """
    try:
        target = path.readlink()
    except OSError:
        return None
    if target.is_absolute():
        return target.name if target.parent == path.parent.resolve() else None
    return target.name if len(target.parts) == 1 and target.name not in (".", "..") else None


def _text_of(place: Place, name: str) -> str | None:
    limit = _STATE_BYTES_MAX if name == _TENSORFLOW else limits.TEXT_BYTES_MAX
    try:
        with place.open(name) as reader:
            if reader.size_bytes > limit:
                return None
            return reader.head(limit).decode("utf-8", "replace")
    except ProblemError:
        return None


def _target_of(name: str, text: str) -> str | None:
    if name == _TENSORFLOW:
        matches = (_PATH.match(line) for line in text.splitlines())
        paths = [m["path"] for m in matches if m is not None and m["key"][0] == "m"]
        return Path(paths[0]).name if paths else None
    word = text.strip().strip("\0")
    if name == _MEGATRON:
        if word == "release":
            return "release"
        return f"iter_{int(word):07d}" if word.isascii() and word.isdigit() else None
    return Path(word).name if word and "\n" not in word else None


def _rewritten_state(text: str, target: str, present: set[str]) -> str:
    """TensorFlow's ``checkpoint``: the newest path, and a list of all with their times."""
    paths, times = [], []
    for line in text.splitlines():
        match = _PATH.match(line)
        if match is not None and match["key"].startswith("all_"):
            paths.append(match["path"])
        elif _TIMESTAMP.match(line):
            times.append(line)
    known = len(paths) == len(times)
    kept = [number for number, path in enumerate(paths) if Path(path).name in present]
    newest = next((path for path in paths if Path(path).name == target), target)
    lines = [f'model_checkpoint_path: "{newest}"']
    lines += [f'all_model_checkpoint_paths: "{paths[number]}"' for number in kept]
    if newest not in (paths[number] for number in kept):
        lines.append(f'all_model_checkpoint_paths: "{newest}"')
    elif known:
        lines += [times[number] for number in kept]
    return "\n".join(lines) + "\n"
