"""Jobs that mpirun starts: four real processes over MPI, with a directory each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

pytestmark = [pytest.mark.frameworks("mpi4py"), pytest.mark.slow]
pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install mpi4py mpich)")

RANKS = 4
BEGIN = """
import os, signal, sys
from pathlib import Path
from cxlfs.job import Checkpointer, Nothing, UndecidedError
root, loaded = Path(sys.argv[1]), []
def save(directory): (directory / "shard.bin").write_bytes(b"%d" % made.world.rank * 3_000_000)
def load(directory): loaded.append((directory / "shard.bin").read_bytes())
def begin(**how):
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "")))
    node = root / f"node{rank}"
    how = {"deadline_seconds": 60, **how}
    return Checkpointer(node, domain=node.name, allow_volatile=True, **how)
"""


def mpirun() -> str:
    """That of the environment, as MPI from PyPI has it, or the system's."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    return found or pytest.skip("no mpirun (pip install mpich, or apt install openmpi-bin)")


def run(program: str, root: Path) -> str:
    open_mpi = {  # four processes, as root, on a machine of any size; 4 and 5 have other names
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        [mpirun(), "-n", str(RANKS), sys.executable, "-c", BEGIN + program, root],
        env={**os.environ, **open_mpi, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_all_save_and_all_resume_with_one_store_lost(tmp_path: Path) -> None:
    program = """
made = begin(replicas=2)
found = made.restore_from_checkpoint(load)
assert type(made.engine).__name__ == "MpiEngine", made.engine
if isinstance(found, Nothing):
    for step in (10, 20):
        outcome = made.distributed_checkpoint(step, save)
        assert outcome.is_cleaned, outcome
    made.async_checkpoint(30, lambda directory, _: save(directory), snapshot=lambda: None)
else:
    assert loaded == [b"%d" % made.world.rank * 3_000_000], "other bytes"
made.close()
print(getattr(found, "step", None), flush=True)
"""
    assert run(program, tmp_path).split() == ["None"] * RANKS
    shutil.rmtree(tmp_path / "node2")
    assert run(program, tmp_path).split() == ["30"] * RANKS


@pytest.mark.timeout(240)
def test_a_rank_that_is_not_heard(tmp_path: Path) -> None:
    """It stays away from a checkpoint; the others wait as long as they were told."""
    program = """
made = begin(deadline_seconds=1)
made.restore_from_checkpoint(load)
if made.world.rank != 3:
    try:
        made.distributed_checkpoint(10, save)
    except UndecidedError as error:
        print("undecided", flush=True)
made.deadline_seconds = 60
made.engine.say("end", b"")
assert len(made.engine.hear("end", range(4), 60)) == 4
"""
    assert run(program, tmp_path).split() == ["undecided"] * (RANKS - 1)


@pytest.mark.timeout(240)
def test_a_link_that_one_end_gives_up(tmp_path: Path) -> None:
    program = """
from cxlfs.errors import JobLinkError
made = begin()
if made.world.rank < 2:
    link = made.engine.link(1 - made.world.rank, "link", 60)
    if made.world.rank == 0:
        link.send(bytearray(b"first")).wait()
        link.close(is_done=False)
    else:
        into = bytearray(5)
        link.receive(into).wait()
        assert into == b"first"
        try:
            link.receive(into).wait()
        except JobLinkError as error:
            print(error, flush=True)
made.engine.say("end", b"")
assert len(made.engine.hear("end", range(4), 60)) == 4
"""
    assert run(program, tmp_path).strip() == "rank 0 gave up"


def test_ranks_in_groups(tmp_path: Path) -> None:
    """As a large job has them: of two here."""
    program = """
import cxlfs.job.engines.mpi as mpi
mpi.group_size_of = lambda size: 2
made = begin()
made.restore_from_checkpoint(load)
assert made.world.group_size == 2
def failing(directory):
    if made.world.rank == 3:
        raise ValueError("it cannot")
first = made.distributed_checkpoint(1, save)
second = made.distributed_checkpoint(2, failing)
made.close()
print(type(first).__name__, first.is_cleaned, type(second).__name__, second.reasons, flush=True)
"""
    told = run(program, tmp_path).splitlines()
    assert told == ["Committed True Aborted ((3, 'ValueError: it cannot'),)"] * RANKS
