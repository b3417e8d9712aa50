"""How processes of a job end while threads of theirs wait in the key-value store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

pytest.importorskip("torch", reason="pip install 'cxlfs[torch]' has it")

PROGRAM = """
import sys, threading, time
from torch import distributed
from cxlfs.job.engines.torch import StoreEngine

server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
engines = {}

def begin(rank):
    engines[rank] = StoreEngine(distributed.PrefixStore("job", server.clone()), rank, 2, "0")

threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

waits = threading.Event()

def meet():
    waits.set()
    engines[1].link(0, "nobody comes", float(sys.argv[1]))

threading.Thread(target=meet, daemon=True).start()
waits.wait()
time.sleep(0.2)
print("main ends", flush=True)
"""


@pytest.mark.parametrize("seconds", [0.3, 0.4, 60.0])
def test_a_thread_that_waits_for_another_rank_does_not_abort_the_end(
    tmp_path: Path, seconds: float
) -> None:
    """As when Ctrl-C ends a rank whose copies are on their way: what it waits for ends in time,
    while the interpreter ends, or later.
    """
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, script, str(seconds)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "main ends\n", done.stderr
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr


def test_a_checkpoint_in_flight_is_copied_while_the_process_ends(tmp_path: Path) -> None:
    """Its thread is no daemon: the end waits for it, and its links are made meanwhile."""
    script = tmp_path / "program.py"
    script.write_text(
        PROGRAM.partition("waits =")[0]
        + """
def meet(rank):
    time.sleep(0.5)
    engines[rank].link(1 - rank, "1/copies", 60.0).close(is_done=True)
    print("met", flush=True)

for rank in range(2):
    threading.Thread(target=meet, args=(rank,)).start()
"""
    )
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["met", "met"], done.stderr
    assert done.returncode == 0


def test_a_second_checkpoint_makes_no_connections(tmp_path: Path) -> None:
    """Those of the first are used again: each would cost the server a look-up of a name."""
    script = tmp_path / "program.py"
    script.write_text(
        PROGRAM.partition("waits =")[0]
        + """
made = []
clone = distributed.PrefixStore.clone
stores = [engine._store for engine in engines.values()]

class Counted:
    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        if name == "clone":
            made.append(name)
        return getattr(self.store, name)

for engine in engines.values():
    engine._store = Counted(engine._store)

def meet(rank, name):
    engines[rank].link(1 - rank, name, 60.0).close(is_done=True)

for name in ("1/copies", "2/copies", "3/copies"):
    threads = [threading.Thread(target=meet, args=(rank, name)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(made), flush=True)
"""
    )
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "2\n"
