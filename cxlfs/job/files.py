"""How a checkpoint of a job lies in a directory: names, manifests, commits.

    step-000000000100.000007-0123456789abcdef/     an attempt: step, number, id
        rank-00003.tmp/                            being saved
        rank-00003/                                voted for: shards, and
            manifest.json                          what they are
        commit-00003.json                          rank 3, for its store: all have voted
        drained-00003.json                         its shards are in the tier below, too
    .cxlfs-job-going/                              older ones that are being removed

Never: which attempt counts (``protocol``), what a store lies on (``medium``).

Invariants
- What has its final name is complete and durable: it was written beside it, synced and renamed, and
  the directory was synced behind the rename.
- What is read may come from anywhere. Names, sizes and numbers are checked before anything is
  allocated or opened for them; no name leads out of its directory.
- What is removed loses its name first, or its manifest: half of it is nothing.
- A manifest or commit of which any byte was changed is nothing: both have a checksum of it all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cxlfs.durable import opened_file, promised_crc32c, sync_directory, write_durably
from cxlfs.errors import JobFilesError
from cxlfs.job import lines
from cxlfs.job.protocol import Attempt, Commit, Held, Inventory
from cxlfs.job.protocol.messages import attempt_of
from cxlfs.job.reading_back import commit_of, read_back
from cxlfs.native import crc32c
from cxlfs.plain import Plain, PlainError, constant, fields, number, parse, row, text

log = logging.getLogger(__name__)

FORMAT = 3
"""It says of which job. In format 2, of attempts before there were lines, it does not."""
FORMAT_BEFORE = 2
COMMIT_FORMAT = 2
"""Its digest is a sum over all ranks (see ``protocol.digest_of``)."""
MANIFEST_NAME = "manifest.json"
MANIFEST_BYTES_MAX = 64 << 20
COMMIT_BYTES_MAX = 1 << 20
SHARDS_MAX = 1 << 18
_ATTEMPT = re.compile(r"step-(\d{12,19})\.(\d{6,19})-([0-9a-f]{16}|[0-9a-f]{20})", re.ASCII)
_RANK = re.compile(r"rank-(\d{5,10})", re.ASCII)
_RECEIVING_NAME = ".cxlfs-receiving"
"""See ``tier.staging``."""
_COMMIT = re.compile(r"commit-(\d{5,10})\.json", re.ASCII)
_OF_RANK = re.compile(r"(?:rank|commit)-(\d{5,10})(?![0-9])", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """``name``: below the rank's directory; ``crc32c``: of the whole file; ``commit``: see
    ``reading_back.commit_of``, in the store that it was saved in.
    """

    name: str
    size_bytes: int
    crc32c: int
    commit: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Medium:
    """What a store lies on, as ``cxlfs status`` says; empty texts: not known."""

    uuid: str = ""
    kind: str = ""
    write_back: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """``store``: see ``medium.identity``; ``node``: its host's name; ``domain``: with what it
    fails, as it stated; ``job``: see ``protocol.Line``, or empty.
    """

    attempt: Attempt
    rank: int
    world: int
    node: str
    store: str
    medium: Medium
    shards: tuple[Shard, ...]
    domain: str = ""
    job: str = ""

    def encode(self) -> bytes:
        plain = {"format": FORMAT, **dataclasses.asdict(self)}
        if not self.job:
            del plain["job"]
            plain["format"] = FORMAT_BEFORE
        return _summed(json.dumps(plain, indent=1, sort_keys=True).encode().removesuffix(b"\n}"))


_SUM = b',\n "crc32c": '


def _summed(fields_before: bytes) -> bytes:
    """With a last field: the checksum of all that is before it."""
    return b"%s%s%d\n}\n" % (fields_before, _SUM, crc32c(fields_before))


def digest_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- names --------------------------------------------------------------------------------------


def attempt_name(attempt: Attempt) -> str:
    return f"step-{attempt.step:012d}.{attempt.number:06d}-{attempt.id}"


def rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def rank_path(root: Path, attempt: Attempt, rank: int) -> Path:
    return root / attempt_name(attempt) / rank_name(rank)


def staging_path(root: Path, attempt: Attempt, rank: int) -> Path:
    return root / attempt_name(attempt) / f"{rank_name(rank)}.tmp"


def attempt_named(name: str) -> Attempt | None:
    """None: it is the name of none."""
    found = _ATTEMPT.fullmatch(name)
    if found is None:
        return None
    step, order, own = found.groups()
    attempt = Attempt(int(order), int(step), own)
    return attempt if attempt_name(attempt) == name else None


def _attempts(root: Path) -> Iterator[tuple[Attempt, Path]]:
    for entry in entries(root):
        attempt = attempt_named(entry.name)
        if attempt is not None and entry.is_dir(follow_symlinks=False):
            yield attempt, Path(entry.path)


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """None of what is not there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return list(entries)
    return []


# --- writing ------------------------------------------------------------------------------------


def begin(root: Path, attempt: Attempt, rank: int) -> Path:
    """An empty directory to save into, which does not count yet."""
    path = staging_path(root, attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir()
    sync_directory(root)
    return path


def begin_anew(root: Path, attempt: Attempt, rank: int) -> Path:
    """As ``begin``; what another try has left there is removed."""
    for path in rank_path(root, attempt, rank).parent.glob(f"{rank_name(rank)}.*"):
        shutil.rmtree(path)
    return begin(root, attempt, rank)


def seal(root: Path, manifest: Manifest) -> str:
    """The shards get their manifest and their place; its digest. Durable on return. What was in
    that place (a damaged copy, in whose stead one was fetched) goes.
    """
    staged = staging_path(root, manifest.attempt, manifest.rank)
    data = manifest.encode()
    write_durably(staged / MANIFEST_NAME, data)
    for directory in sorted({(staged / shard.name).parent for shard in manifest.shards}):
        sync_directory(directory)
    path = rank_path(root, manifest.attempt, manifest.rank)
    aside = path.with_name(f"{path.name}.replaced.tmp")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
    staged.rename(path)
    sync_directory(path.parent)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside)
    return digest_of_bytes(data)


def record_commit(
    root: Path, attempt: Attempt, rank: int, digest: str, copies: Sequence[str] = ()
) -> None:
    """For the store; ``copies``: other stores that have shards of its ranks. Durable on return."""
    commit = Commit(attempt, digest)
    plain = {
        "format": COMMIT_FORMAT,
        **dataclasses.asdict(commit),
        "copies": list(copies),
        "crc32c": _crc_of(commit, copies),
    }
    path = root / attempt_name(attempt) / f"commit-{rank:05d}.json"
    path.parent.mkdir(exist_ok=True)
    write_durably(path, json.dumps(plain).encode())


def record_drained(root: Path, attempt: Attempt, rank: int) -> None:
    """The rank's shards are in the tier below, too."""
    plain = {"format": FORMAT, "attempt": dataclasses.asdict(attempt)}
    write_durably(_drained_path(root, attempt, rank), json.dumps(plain).encode())


def has_drained(root: Path, attempt: Attempt, rank: int) -> bool:
    """That was recorded."""
    return _drained_path(root, attempt, rank).exists()


def _drained_path(root: Path, attempt: Attempt, rank: int) -> Path:
    return root / attempt_name(attempt) / f"drained-{rank:05d}.json"


def has_copies(directory: Path) -> bool:
    """An attempt's: shards of what lies there are in other stores, too, as its commit says, or
    manifests of two stores. Raises OSError.
    """
    attempt = attempt_named(directory.name)
    if attempt is None:
        return False
    stores = set()
    for entry in entries(directory):
        with contextlib.suppress(JobFilesError, FileNotFoundError):
            path = Path(entry.path)
            if _COMMIT.fullmatch(entry.name) and _commit(attempt, path)[1]:
                return True
            if _RANK.fullmatch(entry.name):
                data = _read(path / MANIFEST_NAME, MANIFEST_BYTES_MAX)
                stores.add(decode_manifest(data, path).store)
    return len(stores) > 1


def is_drained(directory: Path) -> bool:
    """An attempt's: all shards that lie in it are in the tier below, too. Raises OSError."""
    if attempt_named(directory.name) is None:
        return False
    names = {entry.name for entry in entries(directory)}
    ranks = [int(found[1]) for found in map(_RANK.fullmatch, names) if found is not None]
    return bool(ranks) and all(f"drained-{rank:05d}.json" in names for rank in ranks)


# --- shards -------------------------------------------------------------------------------------


def measure(directory: Path) -> tuple[Shard, ...]:
    """What was saved, each file as ``measured``.

    Raises JobFilesError (a file that is none, or fails), OSError.
    """
    shards = []
    for path in _files(directory):
        name = path.relative_to(directory).as_posix()
        if name == MANIFEST_NAME:
            raise JobFilesError(f"{path}: the name is that of the manifest")
        shards.append(measured(path, name))
    if len(shards) > SHARDS_MAX:
        raise JobFilesError(f"{directory}: {len(shards)} files, more than {SHARDS_MAX}")
    return tuple(shards)


def measured(path: Path, name: str) -> Shard:
    """Synced, read back from the medium, and its checksum compared with what the store says it has
    to be.

    Raises JobFilesError, OSError.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
    size, found = read_back(path)
    wanted = promised_crc32c(path)
    if wanted is not None and wanted != found:
        raise JobFilesError(f"{path}: CRC32C {found:08x}, and not {wanted:08x}")
    return Shard(name, size, found, commit_of(path))


def _files(directory: Path) -> Iterator[Path]:
    for entry in sorted(entries(directory), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)
        else:
            raise JobFilesError(f"{entry.path}: neither a file nor a directory")


def verify(root: Path, attempt: Attempt, rank: int, digest: str) -> Path:
    """The directory of shards that are, byte for byte, what the manifest of that digest says.

    Raises JobFilesError, OSError.
    """
    directory = rank_path(root, attempt, rank)
    manifest = decode_manifest(read_manifest(directory, digest), directory)
    for shard in manifest.shards:
        path = directory / shard.name
        found = read_back(path, shard.size_bytes)
        if found != (shard.size_bytes, shard.crc32c):
            raise JobFilesError(f"{path}: CRC32C {found[1]:08x}, not {shard.crc32c:08x}")
    return directory


# --- reading ------------------------------------------------------------------------------------


def read_shard(directory: Path, shard: Shard, size_max: int) -> bytes:
    """As its manifest says. Raises JobFilesError (also: larger than ``size_max``), OSError."""
    path = directory / shard.name
    data = _read(path, size_max)
    if (len(data), crc32c(data)) != (shard.size_bytes, shard.crc32c):
        raise JobFilesError(f"{path}: not what its manifest says")
    return data


def read_manifest(directory: Path, digest: str) -> bytes:
    """The one of that digest. Raises JobFilesError, OSError."""
    data = _read(directory / MANIFEST_NAME, MANIFEST_BYTES_MAX)
    if digest_of_bytes(data) != digest:
        raise JobFilesError(f"{directory}: another manifest than the one that was chosen")
    return data


def _read(path: Path, size_max: int) -> bytes:
    """Raises JobFilesError (larger, or no file), OSError."""
    with opened_file(path, JobFilesError) as (descriptor, size_bytes):
        if size_bytes > size_max:
            raise JobFilesError(f"{path}: larger than {size_max} bytes")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(size_max + 1)


def decode_manifest(data: bytes, where: Path) -> Manifest:
    """Raises JobFilesError."""
    try:
        found = parse(data, MANIFEST_BYTES_MAX)
        has_job = isinstance(found, dict) and "job" in found
        plain = fields(found, _MANIFEST_FIELDS if has_job else _FIELDS_BEFORE)
        constant(plain["format"], FORMAT if has_job else FORMAT_BEFORE)
        manifest = Manifest(
            attempt_of(plain["attempt"]),
            number(plain["rank"]),
            number(plain["world"]),
            text(plain["node"]),
            text(plain["store"]),
            _medium(plain["medium"]),
            row(plain["shards"], _shard, SHARDS_MAX),
            text(plain["domain"]),
            text(plain["job"]) if has_job else "",
        )
    except PlainError as error:
        raise JobFilesError(f"{where}: {error}") from None
    if has_job and not manifest.job:
        raise JobFilesError(f"{where}: its manifest is of no job")
    if data != _summed(data.rpartition(_SUM)[0]):
        raise JobFilesError(f"{where}: its manifest is damaged")
    return manifest


_MANIFEST_FIELDS = ("format", "crc32c", *(field.name for field in dataclasses.fields(Manifest)))
_FIELDS_BEFORE = tuple(name for name in _MANIFEST_FIELDS if name != "job")


def _medium(plain: Plain) -> Medium:
    found = fields(plain, ("uuid", "kind", "write_back"))
    return Medium(text(found["uuid"]), text(found["kind"]), text(found["write_back"]))


def _shard(plain: Plain) -> Shard:
    found = fields(plain, ("name", "size_bytes", "crc32c", "commit"))
    name, crc = text(found["name"]), number(found["crc32c"])
    parts = name.split("/")
    if not name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise PlainError("a name that leads elsewhere")
    if crc >> 32:
        raise PlainError("a checksum of more than 32 bits")
    return Shard(name, number(found["size_bytes"]), crc, number(found["commit"]))


def take_stock(root: Path, store: str) -> tuple[Inventory, tuple[str, ...]]:
    """What lies there, and what was left out, as it is not what it should be.

    Raises JobFilesError (a decision cannot be read), OSError.
    """
    held, commits, problems, damaged = [], [], [], []
    for attempt, directory in sorted(_attempts(root)):
        for entry in entries(directory):
            path = Path(entry.path)
            try:
                if found := _RANK.fullmatch(entry.name):
                    held.append(_held(attempt, int(found[1]), path))
                elif _COMMIT.fullmatch(entry.name):
                    commits.append(_commit(attempt, path)[0])
            except FileNotFoundError as error:  # its removal was begun
                problems.append(str(error))
            except JobFilesError as error:
                problems.append(str(error))
                if found is not None:
                    damaged.append((attempt, int(found[1])))
    records, torn = lines.lines_in(root)
    return (
        Inventory(
            store,
            tuple(sorted(held)),
            tuple(sorted(set(commits))),
            job=next((line.job for line in records), ""),
            lines=records,
            damaged=tuple(sorted(damaged)),
            decision=lines.decision_in(root),
            torn=torn,
        ),
        tuple(problems),
    )


def logged_inventory(root: Path, store: str, domain: str = "") -> Inventory:
    """``take_stock`` as others are told it; what was left out is logged. Raises OSError."""
    inventory, problems = take_stock(root, store)
    for problem in problems:
        log.warning("left out: %s", problem)
    return dataclasses.replace(inventory, domain=domain)


def _held(attempt: Attempt, rank: int, directory: Path) -> Held:
    data = _read(directory / MANIFEST_NAME, MANIFEST_BYTES_MAX)
    manifest = decode_manifest(data, directory)
    if (manifest.attempt, manifest.rank) != (attempt, rank):
        raise JobFilesError(f"{directory}: its manifest is of {manifest.attempt}")
    return Held(attempt, rank, manifest.world, digest_of_bytes(data))


def _commit(attempt: Attempt, path: Path) -> tuple[Commit, tuple[str, ...]]:
    """And the other stores that have shards."""
    try:
        plain = fields(parse(_read(path, COMMIT_BYTES_MAX), COMMIT_BYTES_MAX), _COMMIT_FIELDS)
        constant(plain["format"], COMMIT_FORMAT)
        commit = Commit(attempt_of(plain["attempt"]), text(plain["digest"]))
        copies = row(plain["copies"], text)
    except PlainError as error:
        raise JobFilesError(f"{path}: {error}") from None
    if commit.attempt != attempt:
        raise JobFilesError(f"{path}: it is of {commit.attempt}")
    if plain["crc32c"] != _crc_of(commit, copies):
        raise JobFilesError(f"{path}: damaged")
    return commit, copies


_COMMIT_FIELDS = ("format", "attempt", "digest", "copies", "crc32c")


def _crc_of(commit: Commit, copies: Sequence[str]) -> int:
    """A digest that is damaged would speak against the shards that all have voted for."""
    return crc32c(" ".join((str(commit.attempt), commit.digest, *copies)).encode())


# --- removing -----------------------------------------------------------------------------------


def remove_rank(root: Path, attempt: Attempt, rank: int) -> None:
    """What a store holds of a rank's in an attempt, whose directory goes with the last of it."""
    directory = rank_path(root, attempt, rank)
    with contextlib.suppress(FileNotFoundError):
        (directory / MANIFEST_NAME).unlink()
        sync_directory(directory)
    for path in (directory, *directory.parent.glob(f"{directory.name}.*")):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
    for name in ("commit", "drained"):
        for path in directory.parent.glob(f"{name}-{rank:05d}.json*"):  # and what was not finished
            path.unlink(missing_ok=True)
    _remove_empty(directory.parent)


def _remove_empty(directory: Path) -> None:
    """What other ranks have in it stays; what a fetch from the tier has left goes with the last."""
    if {entry.name for entry in entries(directory)} == {_RECEIVING_NAME}:
        shutil.rmtree(directory / _RECEIVING_NAME)
    with contextlib.suppress(OSError):
        directory.rmdir()


def remove_ranks(root: Path, attempt: Attempt, is_mine: Callable[[int], bool]) -> None:
    """Of the ranks whose things in an attempt are this one's to remove."""
    directory = root / attempt_name(attempt)
    names = [_OF_RANK.match(entry.name) for entry in entries(directory)]
    for rank in filter(is_mine, {int(name[1]) for name in names if name is not None}):
        remove_rank(root, attempt, rank)
    _remove_empty(directory)


def remove_unfinished(root: Path, attempt: Attempt, is_mine: Callable[[int], bool]) -> None:
    """What was being copied into an attempt that stays, when its rank died."""
    for entry in entries(root / attempt_name(attempt)):
        found = _OF_RANK.match(entry.name)
        is_staged = entry.name.startswith("rank-") and entry.name.endswith(".tmp")
        if is_staged and found is not None and is_mine(int(found[1])):
            shutil.rmtree(entry.path, ignore_errors=True)
    _remove_empty(root / attempt_name(attempt))


# --- all of an attempt --------------------------------------------------------------------------


def attempts_in(root: Path) -> tuple[Attempt, ...]:
    """Of which anything lies there."""
    return tuple(attempt for attempt, _ in _attempts(root))
