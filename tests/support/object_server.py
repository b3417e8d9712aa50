"""A small object server that speaks enough of S3 for obstore, and misbehaves as it is told.

Never: keeps anything but in memory; checks a signature.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

BUCKET = "bucket"


@dataclasses.dataclass
class Habits:
    """What it does wrong."""

    accepts_second_create: bool = False
    has_md5_tags: bool = True
    lists: bool = True
    may_delete: bool = True
    full_after_bytes: int | None = None
    """Then each put ends with 507."""
    busy: int = 0
    """So many requests end with 503 (from each on: they are counted down)."""
    alters: Callable[[str, bytes], bytes | None] = lambda _key, data: data
    """What is kept of a put object, or of one that was put in parts; None: nothing is, and the put
    succeeds all the same."""
    cuts_after_bytes: int | None = None
    """Of each body that is read."""
    on_put: Callable[[str], None] = lambda _key: None


@dataclasses.dataclass
class Kept:
    data: bytes
    tag: str


class ObjectServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.habits = Habits()
        self.objects: dict[str, Kept] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.bytes_put = 0
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed, or that end, in the middle of an answer: not the server's."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def puts_of(self, key: str) -> int:
        return sum(1 for method, path in self.requests if (method, path) == ("PUT", key))

    def keep(self, key: str, data: bytes, tag: str) -> str:
        kept = self.habits.alters(key, data)
        if not self.habits.has_md5_tags:
            tag = hashlib.sha1(tag.encode(), usedforsecurity=False).hexdigest()
        if kept is not None:
            self.objects[key] = Kept(kept, tag)
        return tag


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  its signature
        """Nothing: the tests look at the server itself."""

    def _begin(self) -> tuple[str, dict[str, str], bytes]:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = urllib.parse.unquote(path).removeprefix(f"/{BUCKET}").lstrip("/")
        arguments = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        with self.server.lock:
            self.server.requests.append((self.command, key))
        return key, arguments, body

    def _is_busy(self) -> bool:
        with self.server.lock:
            is_busy = self.server.habits.busy > 0
            self.server.habits.busy -= is_busy
        if is_busy:
            self._end(503, b"<Error><Code>SlowDown</Code></Error>")
        return is_busy

    def _end(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        key, arguments, body = self._begin()
        if self._is_busy():
            return
        server, habits = self.server, self.server.habits
        habits.on_put(key)
        with server.lock:
            server.bytes_put += len(body)
            if habits.full_after_bytes is not None and server.bytes_put > habits.full_after_bytes:
                self._end(507, b"<Error><Code>InsufficientStorage</Code></Error>")
                return
            tag = hashlib.md5(body, usedforsecurity=False).hexdigest()
            if "uploadId" in arguments:
                server.uploads[arguments["uploadId"]][int(arguments["partNumber"])] = body
                self._end(200, ETag=f'"{tag}"')
                return
            is_create = self.headers.get("If-None-Match") == "*"
            if is_create and key in server.objects and not habits.accepts_second_create:
                self._end(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            tag = server.keep(key, body, tag)
        self._end(200, ETag=f'"{tag}"')

    def do_POST(self) -> None:
        key, arguments, body = self._begin()
        if self._is_busy():
            return
        server = self.server
        if "uploads" in arguments:
            upload = f"{len(server.uploads)}"
            server.uploads[upload] = {}
            text = f"<UploadId>{upload}</UploadId>"
            self._answer("InitiateMultipartUploadResult", text)
        elif "uploadId" in arguments:
            parts = server.uploads.pop(arguments["uploadId"])
            ordered = [parts[number] for number in sorted(parts)]
            sums = b"".join(hashlib.md5(p, usedforsecurity=False).digest() for p in ordered)
            tag = f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(ordered)}"
            tag = server.keep(key, b"".join(ordered), tag)
            text = f'<ETag>"{tag}"</ETag>'
            self._answer("CompleteMultipartUploadResult", text)
        else:  # ?delete
            keys = [urllib.parse.unquote(k) for k in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for each in keys:
                server.requests.append(("DELETE", each))
                if server.habits.may_delete:
                    server.objects.pop(each, None)
            if not server.habits.may_delete:
                rows = "".join(
                    f"<Error><Key>{k}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
                    for k in keys
                )
            else:
                rows = "".join(f"<Deleted><Key>{k}</Key></Deleted>" for k in keys)
            self._answer("DeleteResult", rows)

    def do_DELETE(self) -> None:
        key, arguments, _ = self._begin()
        if "uploadId" in arguments:
            self.server.uploads.pop(arguments["uploadId"], None)
        elif not self.server.habits.may_delete:
            self._end(403, b"<Error><Code>AccessDenied</Code></Error>")
            return
        else:
            self.server.objects.pop(key, None)
        self._end(204)

    def do_HEAD(self) -> None:
        self._get(with_body=False)

    def do_GET(self) -> None:
        self._get(with_body=True)

    def _get(self, *, with_body: bool) -> None:
        key, arguments, _ = self._begin()
        if self._is_busy():
            return
        if "list-type" in arguments:
            self._answer("ListBucketResult", self._listing(arguments))
            return
        found = self.server.objects.get(key)
        if found is None:
            self._end(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"")
            return
        data, size = found.data, len(found.data)
        headers = {"ETag": f'"{found.tag}"', "Last_Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
        status = 200
        if (span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is not None:
            begin, end = int(span[1]), min(int(span[2] or size), size - 1)
            status, data = 206, data[begin : end + 1]
            headers["Content_Range"] = f"bytes {begin}-{end}/{size}"
        cut = self.server.habits.cuts_after_bytes
        self.close_connection = with_body and cut is not None and cut < len(data)
        body = data[:cut] if with_body else b""
        self._end(status, body, **headers, Content_Length=str(len(data)))

    def _answer(self, name: str, text: str) -> None:
        self._end(200, f"<{name}>{text}</{name}>".encode(), Content_Type="application/xml")

    def _listing(self, arguments: dict[str, str]) -> str:
        prefix, delimiter = arguments.get("prefix", ""), arguments.get("delimiter", "")
        contents, prefixes = [], set()
        for key, kept in sorted(self.server.objects.items() if self.server.habits.lists else ()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(kept.data)}</Size>"
                f"<LastModified>2026-10-21T07:28:00.000Z</LastModified>"
                f'<ETag>"{kept.tag}"</ETag></Contents>'
            )
        contents += [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in sorted(prefixes)
        ]
        return f"<IsTruncated>false</IsTruncated>{''.join(contents)}"
