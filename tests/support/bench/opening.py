"""Sections ``opening``, ``mount`` and ``memory``: what a store costs beside its data."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time

from cxlfs.media import Granularity, MemoryMedia, open_media
from cxlfs.store import Store, StoreOptions
from cxlfs.units import GIB, KIB, MIB
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    percentiles,
    private_bytes,
    require_memory,
)
from tests.support.bench.targets import make_store, mounted, run_cxlfs

FILES = 10_000
RECORDS = 100_000
MOUNT_STORE_BYTES = 512 * MIB


# --- opening ----------------------------------------------------------------------------------


def measure_opening(settings: Settings, say: Progress) -> Figures:
    """Store.open over memory with 64 MiB segments: no process start, no disk."""
    files, records = settings.scaled(FILES, 1000), settings.scaled(RECORDS, 10_000)
    say(f"opening: making {files} files")
    media = MemoryMedia(33 * GIB, Granularity.LINE)
    Store.format(media)
    store = Store.open(media)
    inos = fill(store, files)
    store.close()
    del store
    say("opening: after a clean end")
    clean = [_time_opening(media, read_only=False) for _ in range(settings.runs)]
    say(f"opening: writing {records} records")
    store = Store.open(media)
    first = store.volume.last_lsn
    while store.volume.last_lsn - first < records:
        _overwrite(store, inos[(store.volume.last_lsn * 7919) % len(inos)])
    store.abandon()
    del store
    say("opening: after a crash")
    crashed = [_time_opening(media, read_only=True) for _ in range(settings.runs)]
    gc.collect()
    began = time.perf_counter()
    store = Store.open(media)
    taking_over = time.perf_counter() - began
    if store.recovery.records != records:
        raise SystemExit(f"replayed {store.recovery.records} records instead of {records}")
    store.close()
    media.close()
    return {
        "files": files,
        "records": records,
        "clean_open_s": statistics.median(clean),
        "crash_open_read_only_s": statistics.median(crashed),
        "crash_open_s": taking_over,
    }


def _time_opening(media: MemoryMedia, *, read_only: bool) -> float:
    gc.collect()  # the store before is no part of this opening
    began = time.perf_counter()
    store = Store.open(media, StoreOptions(read_only=read_only))
    elapsed = time.perf_counter() - began
    if read_only:
        store.abandon()
    else:
        store.close()
    return elapsed


def fill(store: Store, files: int) -> list[int]:
    inos = []
    parent = 1
    for index in range(files):
        if index % 100 == 0:
            parent = store.make_directory(1, b"step-%d" % (index // 100), 0o755, 0, 0).ino
        attributes, handle = store.create(parent, b"shard-%05d" % index, 0o644, 0, 0, os.O_WRONLY)
        store.write(handle, 0, b"x" * 4096)
        store.flush(handle, writer_killed=False)
        store.release(handle)
        inos.append(attributes.ino)
    return inos


def _overwrite(store: Store, ino: int) -> None:
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, b"y" * 4096)
    store.flush(handle, writer_killed=False)
    store.release(handle)


# --- mount ------------------------------------------------------------------------------------


def measure_mount(settings: Settings, say: Progress) -> Figures:
    """Until ``cxlfs mount`` and ``cxlfs umount`` return, the start of their processes included."""
    require_memory(settings.memory, MOUNT_STORE_BYTES)
    files = settings.scaled(FILES, 1000)
    source = settings.memory / "mount.img"
    samples: dict[str, list[float]] = {"mount": [], "umount": []}
    result: Figures = {"files": files}
    with tempfile.TemporaryDirectory(prefix="cxlfs-bench-") as target:
        for kind, count in (("empty", 0), ("full", files)):
            make_store(source, MOUNT_STORE_BYTES)
            media = open_media(str(source))
            store = Store.open(media)
            fill(store, count)
            store.close()
            media.close()
            for run in range(settings.runs):
                say(f"mount: run {run + 1}/{settings.runs}: a store with {count} files")
                moments = [time.perf_counter()]
                run_cxlfs("mount", str(source), target)
                moments.append(time.perf_counter())
                run_cxlfs("umount", target)
                moments.append(time.perf_counter())
                samples["mount"].append(moments[1] - moments[0])
                samples["umount"].append(moments[2] - moments[1])
            for name, values in samples.items():
                result[f"{kind}_{name}"] = percentiles(values)
                values.clear()
            source.unlink()
    return result


# --- memory -----------------------------------------------------------------------------------


def measure_memory(settings: Settings, say: Progress) -> Figures:
    """Anonymous memory of the daemon, with nothing in the store, with data, and with files."""
    size_bytes = min(settings.size_bytes, 2 * GIB)
    files = settings.scaled(FILES, 1000)
    require_memory(settings.memory, size_bytes)
    say("memory: of the daemon")
    block = os.urandom(MIB)
    data_bytes = size_bytes // 2 // MIB * MIB
    with mounted(settings.memory / "memory.img", size_bytes) as (target, pid):
        empty = private_bytes(pid)
        with (target / "data").open("wb", buffering=0) as file:
            for _ in range(data_bytes // MIB):
                file.write(block)
        with_data = private_bytes(pid)
        for index in range(files):
            (target / f"f{index:05d}").write_bytes(b"x")
        with_files = private_bytes(pid)
    return {
        "data_bytes": data_bytes,
        "files": files,
        "empty_bytes": empty,
        "with_data_bytes": with_data,
        "with_files_bytes": with_files,
        "allowed_bytes": 150 * MIB + files * KIB + data_bytes // (64 * KIB) * 16,
    }
