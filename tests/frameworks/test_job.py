"""The example of ``docs/job.md`` under torchrun, two real processes over gloo: a rank is killed,
the job is begun again, and what they end with is bit for bit what they would have had.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mount import Workplace
from tests.support.repository import ROOT

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow]
torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

LOOP = "    optimizer.zero_grad()\n"
KILL = """    if step == 25 and first == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
REST = """
print(f"rank {dist.get_rank()} began at {first}")
torch.save(model.state_dict(), f"{RESULT}/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


def example(root: Path, result: Path, *, killed: bool) -> str:
    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = code.replace('"/mnt/ckpt/run1"', f'"{root}", deadline_seconds=60, allow_volatile=True')
    assert code.count(LOOP) == 1
    if killed:
        code = code.replace(LOOP, KILL + LOOP)
    return f"import os, signal\nRESULT = {str(result)!r}\n{code}{REST}"


def run(program: str, where: Path, *, fails: bool = False) -> str:
    """Under a torchrun that does not begin it again."""
    script = where / "train.py"
    script.write_text(program, encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *command, script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_a_killed_rank_and_the_same_weights(place: Workplace, tmp_path: Path) -> None:
    told = {}
    for killed in (False, True):
        where = tmp_path / str(killed)
        where.mkdir()
        root = place.mountpoint / str(killed)
        program = example(root, where, killed=killed)
        if killed:
            assert "began" not in run(program, where, fails=True)
        told[killed] = run(program, where)
    assert "rank 1 began at 0" in told[False]
    assert "rank 0 began at 20" in told[True]
    assert "rank 1 began at 20" in told[True]
    for rank in range(2):
        wanted, found = (torch.load(tmp_path / name / f"{rank}.pt") for name in ("False", "True"))
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    steps = sorted(path.name[5:17] for path in (place.mountpoint / "True").glob("step-*"))
    assert steps == ["000000000019", "000000000029"]


def test_ranks_that_are_not_heard(place: Workplace, tmp_path: Path) -> None:
    """Rank 1 leaves before it saves: rank 0 waits as long as it was told, and says of whom."""
    program = f"""
import torch.distributed as dist
from cxlfs.job import Checkpointer, UndecidedError
dist.init_process_group("gloo")
made = Checkpointer("{place.mountpoint}/job", deadline_seconds=2, allow_volatile=True)
made.restore_from_checkpoint(lambda path: None)
if dist.get_rank() == 0:
    try:
        made.distributed_checkpoint(1, lambda path: (path / "a").write_bytes(b"x"))
    except UndecidedError as error:
        print(error)
dist.barrier()
dist.destroy_process_group()
"""
    assert "vote: not heard within 2 s: rank 1" in run(program, tmp_path)


def test_beside_training(place: Workplace, tmp_path: Path) -> None:
    """Saved while all ranks talk about gradients; when, is what rank 0's clock says for both."""
    program = f"""
import torch
import torch.distributed as dist
from cxlfs.job import Checkpointer, Restored, every
dist.init_process_group("gloo")
sums = torch.zeros(64)
def snapshot(): return sums.clone()
def save(directory, taken): torch.save(taken, directory / "sums.pt")
def load(directory): sums.copy_(torch.load(directory / "sums.pt"))
due, pending = every(seconds=0.01), []
with Checkpointer("{place.mountpoint}/job", deadline_seconds=30, allow_volatile=True) as made:
    found = made.restore_from_checkpoint(load)
    first = found.step + 1 if isinstance(found, Restored) else 0
    assert sums[0] == 2 * first
    step = first
    while len(pending) < 5:
        gradient = torch.ones(64)
        dist.all_reduce(gradient)
        sums += gradient
        if due.due(step):
            pending.append(made.async_checkpoint(step, save, snapshot=snapshot))
        step += 1
steps = " ".join(str(one.wait().step) for one in pending)
with open(f"{tmp_path}/{{dist.get_rank()}}-{{first}}", "w") as told:
    told.write(steps)
dist.destroy_process_group()
"""
    first = 0
    for _ in range(2):
        run(program, tmp_path)
        told = [(tmp_path / f"{rank}-{first}").read_text().split() for rank in range(2)]
        assert told[0] == told[1]
        assert len(told[0]) == 5
        first = int(told[0][-1]) + 1
