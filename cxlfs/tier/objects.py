"""An object store, as far as a tier needs one: obstore behind plain words and our errors.

Never: decides what an object means (``drain``, ``fetch``); believes that a put has worked (they
look). The one module that imports obstore, when a bucket is opened.

Invariants
- A conditional put is one request, never several parts.
- Every request ends: within a time of its own, and with a bounded number of tries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import importlib
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from cxlfs.durable import sync_directory
from cxlfs.errors import (
    CxlfsError,
    FrameworkMissingError,
    TierFullError,
    TierUnavailableError,
    TierUntrustedError,
    UsageError,
)

PART_BYTES = 8 << 20
"""Of objects that are put in parts; 10 000 of them are the most that S3 takes."""
_PARTS_MAX = 10_000
_REQUEST_SECONDS = 120
_CONNECT_SECONDS = 10
_RETRIES = 6
_RETRY_SECONDS = 120
_MESSAGE_MAX = 300
_LISTED_MAX = 1 << 20
_SCHEMES = frozenset(
    ["s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "file"]
)
_FULL = re.compile(r"\b507\b|insufficient.?storage|no space left|quota", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """An object. ``e_tag``: without quotes; "" where there is none."""

    size_bytes: int
    e_tag: str
    modified: dt.datetime


def part_bytes_of(size_bytes: int) -> int:
    """How large the parts are that an object of that size is put in."""
    parts = -(-size_bytes // _PARTS_MAX)
    return max(PART_BYTES, -(-parts // (1 << 20)) << 20)


class EntityTag:
    """What S3 calls an object whose bytes these are: their MD5; of one in parts that of the parts'
    MD5s, and how many. Never used where security matters: it tells an accident.
    """

    def __init__(self, size_bytes: int) -> None:
        self._part_bytes = part_bytes_of(size_bytes)
        self._is_whole = size_bytes <= self._part_bytes
        self._parts: list[bytes] = []
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0

    def update(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            now = view[: self._part_bytes - self._in_part]
            self._part.update(now)
            self._in_part += len(now)
            view = view[len(now) :]
            if self._in_part == self._part_bytes and not self._is_whole:
                self._end_part()

    def text(self) -> str:
        if self._is_whole:
            return self._part.hexdigest()
        if self._in_part:
            self._end_part()
        whole = hashlib.md5(b"".join(self._parts), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(self._parts)}"

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0


def split_url(url: str) -> tuple[str, str]:
    """That of the place above, and the last name."""
    above, _, name = url.rstrip("/").rpartition("/")
    if not above or above.endswith((":/", ":")):
        raise UsageError(f"{url}: it names no checkpoint", next_step="write URL/NAME")
    return above, urllib.parse.unquote(name)


def open_bucket(url: str) -> Bucket:
    """Raises UsageError (not a URL), FrameworkMissingError, TierUnavailableError."""
    scheme, separator, path = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise UsageError(
            f"{url}: not the URL of an object store",
            next_step="write s3://BUCKET/PATH, gs://, az:// or file:///PATH",
        )
    if {"#", "?"} & set(path):  # obstore leaves out what is behind them
        raise UsageError(f"{url}: a path with # or ?", next_step="write %23 or %3F")
    if scheme == "file" and not path.startswith("/"):
        raise UsageError(f"{url}: not an absolute path", next_step="write file:///PATH")
    obstore = _obstore()
    local = Path(urllib.parse.unquote(path)) if scheme == "file" else None
    retries = {"max_retries": _RETRIES, "retry_timeout": dt.timedelta(seconds=_RETRY_SECONDS)}
    client = {
        "timeout": dt.timedelta(seconds=_REQUEST_SECONDS),
        "connect_timeout": dt.timedelta(seconds=_CONNECT_SECONDS),
        "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"},
    }
    options = {} if local else {"client_options": client, "retry_config": retries}
    if local is not None and not local.is_dir():
        raise TierUnavailableError(f"{url}: no directory", next_step="make it, or mount it")
    try:
        with _failing(url, obstore):
            store = obstore.store.from_url(url, **options)
    except ValueError as error:
        raise UsageError(f"{url}: {_first_line(error)}") from None
    return Bucket(store, url.rstrip("/"), local=local)


def _obstore() -> ModuleType:
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError:
        raise FrameworkMissingError(
            "a tier of objects needs obstore", next_step="pip install 'cxlfs[tier]'"
        ) from None


class Bucket:
    """A place in an object store. ``store``: one of obstore's; ``local``: its directory, where it
    is one: what is put there is synced.

    Methods raise TierUnavailableError, TierFullError.
    """

    def __init__(
        self, store: object, url: str, *, prefix: str = "", local: Path | None = None
    ) -> None:
        self.url = url
        self._store = store
        self._prefix = prefix
        self._local = local
        self._obstore = _obstore()

    def url_of(self, name: str) -> str:
        """As ``split_url`` takes it apart again."""
        return f"{self.url}/{urllib.parse.quote(name)}"

    def below(self, name: str) -> Bucket:
        """The place of that name in it."""
        prefix = f"{self._prefix}{name}/"
        return Bucket(self._store, self.url_of(name), prefix=prefix, local=self._local)

    def is_at(self, name: str, path: Path) -> bool:
        """What lies at ``path`` is what would have that name here. Raises OSError."""
        there = None if self._local is None else self._local / self._key(name)
        return there is not None and there.exists() and there.samefile(path)

    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int, *, parallel: int) -> str:
        """All at once or not at all; the entity tag that the server gives it, or ""."""
        part_bytes = part_bytes_of(size_bytes)
        with self._failing(key):
            if size_bytes <= part_bytes:
                data = b"".join(pieces)
                done = self._obstore.put(
                    self._store, self._key(key), data, mode="overwrite", use_multipart=False
                )
            else:
                done = self._obstore.put(
                    *(self._store, self._key(key), iter(pieces)),
                    chunk_size=part_bytes,
                    max_concurrency=parallel,
                )
            self._sync(key)
        return _tag(done["e_tag"])

    def create(self, key: str, data: bytes) -> bool:
        """False: there is one of that name already. Raises TierUntrustedError where the server does
        not know that.
        """
        with self._failing(key):
            try:
                self._obstore.put(
                    self._store, self._key(key), data, mode="create", use_multipart=False
                )
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            except (self._obstore.exceptions.NotSupportedError, NotImplementedError) as error:
                raise TierUntrustedError(
                    f"{self.url} knows no conditional put: {_first_line(error)}"
                ) from None
            self._sync(key)
        return True

    def read(self, key: str, size_max: int) -> bytes | None:
        """A small object; None: it is not there. Raises TierUntrustedError: it is larger."""
        found = self.look(key)
        if found is None:
            return None
        if found.size_bytes > size_max:
            raise TierUntrustedError(f"{self.url}/{key} has {found.size_bytes} bytes")
        try:
            data = b"".join(self.pieces(key, found.size_bytes))
        except TierUntrustedError:
            if self.look(key) is None:  # another process has removed it since the first look
                return None
            raise
        if len(data) != found.size_bytes:
            raise TierUntrustedError(f"{self.url}/{key} has {len(data)} bytes when it is read")
        return data

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Its bytes, which are so many. A request that breaks off is followed by one for the rest,
        as long as bytes come: how long all of it takes is not bounded.

        Raises TierUntrustedError: it is not there, or has more.
        """
        at = 0
        while True:
            begun = at
            try:
                for piece in self._pieces_from(key, at):
                    at += len(piece)
                    if at > size_bytes:
                        raise TierUntrustedError(
                            f"{self.url}/{key} has more than {size_bytes} bytes"
                        )
                    yield piece
            except TierUnavailableError:
                if at == begun:
                    raise
            else:
                return

    def _pieces_from(self, key: str, begin: int) -> Iterator[bytes]:
        options = {"range": {"offset": begin}} if begin else {}
        with self._failing(key):
            try:
                found = self._obstore.get(self._store, self._key(key), options=options)
                stream = found.stream(1 << 20)
            except FileNotFoundError:
                raise TierUntrustedError(f"{self.url}/{key} is not there") from None
        while True:
            with self._failing(key):
                piece = next(stream, None)
            if piece is None:
                return
            yield bytes(piece)

    def look(self, key: str) -> Found | None:
        with self._failing(key):
            try:
                return _found(self._obstore.head(self._store, self._key(key)))
            except FileNotFoundError:
                return None

    def objects_below(self, key: str) -> dict[str, Found]:
        """All whose names begin with ``key``/, by their names from here on."""
        found: dict[str, Found] = {}
        with self._failing(key):
            for batch in self._obstore.list(self._store, f"{self._key(key)}/", chunk_size=1000):
                for meta in batch:
                    found[str(meta["path"]).removeprefix(self._prefix)] = _found(meta)
                if len(found) > _LISTED_MAX:
                    raise TierUntrustedError(
                        f"{self.url}/{key} has more than {_LISTED_MAX} objects"
                    )
        return found

    def objects_here(self) -> dict[str, Found]:
        """Those right here, not below other names."""
        with self._failing(""):
            listed = self._obstore.list_with_delimiter(self._store, self._prefix or None)
        objects = {str(m["path"]).removeprefix(self._prefix): m for m in listed["objects"]}
        return {name: _found(meta) for name, meta in objects.items()}

    def remove(self, key: str) -> None:
        """It is not there when this returns."""
        with self._failing(key), contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._store, self._key(key))

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _sync(self, key: str) -> None:
        """Obstore's directories are written like any file: it is durable when it was synced."""
        if self._local is None:
            return
        path = self._local / self._key(key)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        for each in path.parents:
            sync_directory(each)
            if each == self._local:
                break

    def _failing(self, key: str) -> contextlib.AbstractContextManager[None]:
        return _failing(f"{self.url}/{key}".rstrip("/"), self._obstore)


@contextlib.contextmanager
def _failing(what: str, obstore: ModuleType) -> Iterator[None]:
    """Errors of obstore become ours."""
    exceptions = obstore.exceptions
    try:
        yield
    except CxlfsError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise TierUnavailableError(
            f"{what}: refused: {_first_line(error)}", next_step="check the credentials"
        ) from error
    except (exceptions.BaseError, FileNotFoundError, TimeoutError) as error:
        text = _first_line(error)
        if _FULL.search(text):
            raise TierFullError(f"{what}: {text}") from error
        raise TierUnavailableError(f"{what}: {text}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return "".join(c if c.isprintable() else "?" for c in text)[:_MESSAGE_MAX]


def _tag(value: object) -> str:
    return str(value).strip('"') if value is not None else ""


def _found(meta: dict[str, object]) -> Found:
    size, modified = meta["size"], meta["last_modified"]
    if not isinstance(size, int) or not isinstance(modified, dt.datetime):
        raise TierUntrustedError(f"an object without a size or a time: {meta}")
    return Found(size, _tag(meta["e_tag"]), modified)
