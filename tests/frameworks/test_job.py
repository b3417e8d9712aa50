"""The examples of ``docs/job.md`` under torchrun, two real processes over gloo: a rank is killed,
the job is begun again, and what they end with is bit for bit what they would have had.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cxlfs.job.engines.torch import Groups, StoreEngine
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
whole = lambda value: getattr(value, "full_tensor", lambda: value)()
weights = {name: whole(value) for name, value in model.state_dict().items()}
torch.save(weights, f"{RESULT}/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


def examples() -> list[str]:
    """Of the document: with DDP, and with FSDP."""
    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == 2
    return found


def example(number: int, root: Path, result: Path, *, killed: bool) -> str:
    where = f'"{root}", deadline_seconds=60, allow_volatile=True'
    code = examples()[number].replace('"/mnt/ckpt/run1"', where)
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


def test_the_examples_are_as_short_as_they_are_said_to_be() -> None:
    assert [example.count("# +") for example in examples()] == [10, 7]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [0, 1], ids=["ddp", "fsdp"])
def test_a_killed_rank_and_the_same_weights(number: int, place: Workplace, tmp_path: Path) -> None:
    told = {}
    for killed in (False, True):
        where = tmp_path / str(killed)
        where.mkdir()
        root = place.mountpoint / str(killed)
        program = example(number, root, where, killed=killed)
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


def test_messages_over_a_key_value_store() -> None:
    """What is there is heard, whoever else is missing; a store that is gone is one more silence."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(5) as pool:
        ranks = list(pool.map(of_rank, [server] * 5, range(5)))
    assert len({engine.world().incarnation for engine in ranks}) == 1
    for engine in (ranks[0], ranks[1], ranks[4]):
        engine.say("vote", b"%d" % engine.world().rank)
    heard = {0: b"0", 1: b"1", 4: b"4"}
    assert ranks[2].hear("vote", range(5), 0.05) == heard
    assert ranks[2].hear("vote", range(5), 0) == heard
    assert ranks[3].hear("vote", [4, 1], 20) == {4: b"4", 1: b"1"}
    assert ranks[3].hear("nothing", range(5), 0) == {}
    ranks[1].forget("vote")
    assert ranks[2].hear("vote", range(5), 0) == {0: b"0", 4: b"4"}
    del server
    gone = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = StoreEngine(torch.distributed.TCPStore("127.0.0.1", gone.port), 0, 1, "0")
    del gone
    alone.say("vote", b"0")
    assert alone.hear("vote", [0], 20) == {}


def of_rank(server: torch.distributed.TCPStore, rank: int) -> StoreEngine:
    return StoreEngine(torch.distributed.PrefixStore("job", server.clone()), rank, 5, "0")


def test_groups_over_key_value_stores() -> None:
    """Each group talks in its leader's store, and all in that of all; one whose leader is gone is
    one more silence.
    """
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    engines: dict[int, StoreEngine] = {}

    def begin(rank: int) -> None:
        engines[rank] = StoreEngine(server.clone(), rank, 5, "0", Groups(server.host, 2))

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {engine.world().group_size for engine in engines.values()} == {2}
    for rank, engine in engines.items():
        engine.say("vote", b"%d" % rank, near=True)
    assert engines[2].hear("vote", [2, 3], 20, near=True) == {2: b"2", 3: b"3"}
    assert engines[1].hear("vote", [0], 20, near=True) == {0: b"0"}
    assert engines[1].hear("vote", [2], 0.05, near=True) == {}
    assert engines[1].hear("vote", range(5), 0) == {}
    engines[2].say("part", b"of 2")
    assert engines[0].hear("part", [2], 20) == {2: b"of 2"}
    engines[3].forget("vote")
    assert engines[2].hear("vote", [2, 3], 0, near=True) == {2: b"2"}
    del engines[2], engine
    engines[3].say("late", b"3", near=True)
    assert engines[3].hear("vote", [2], 0.2, near=True) == {}


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


COPIES = """
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from cxlfs.job import Checkpointer, Restored
dist.init_process_group("gloo")
rank = dist.get_rank()
store = distributed_c10d._get_default_store()
weights = torch.full((3_000_000,), float(rank))
def save(directory): torch.save(weights, directory / "weights.pt")
def load(directory): assert torch.equal(torch.load(directory / "weights.pt"), weights)
made = Checkpointer(f"{ROOT}/node{rank}", replicas=2, domain=f"node{rank}", deadline_seconds=60,
                    allow_volatile=True)
found = made.restore_from_checkpoint(load)
first = found.step + 1 if isinstance(found, Restored) else 0
sizes = []
for step in range(first, first + 3):
    outcome = made.distributed_checkpoint(step, save)
    assert outcome.is_cleaned, outcome
    dist.barrier()
    sizes.append(sum("copies" in key for key in store.list_keys()))
    dist.barrier()
fetched = getattr(found, "is_fetched", None)
print(f"rank {rank} began at {first}, fetched {fetched}, {sizes[-1]} keys", flush=True)
made.close()
dist.destroy_process_group()
"""


OVER = {
    "sockets": "from cxlfs.job.engines import torch as engine; engine.TorchLink = None",
    "gloo": """
from cxlfs.job.engines import sockets
def nowhere(host): raise OSError(host)
sockets._address = nowhere
""",
}
"""In which the other way fails."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("over", OVER)
def test_a_node_that_lost_its_store(place: Workplace, tmp_path: Path, over: str) -> None:
    """Its shards come back from the other node; no keys of links are left behind."""
    program = f"ROOT = {str(place.mountpoint / 'job')!r}\n{OVER[over]}\n{COPIES}"
    told = run(program, tmp_path)
    assert "rank 0 began at 0, fetched None, 0 keys" in told
    shutil.rmtree(place.mountpoint / "job" / "node1")
    told = run(program, tmp_path)
    assert "rank 0 began at 3, fetched False, 0 keys" in told
    assert "rank 1 began at 3, fetched True, 0 keys" in told
    for node in ("node0", "node1"):
        held = (place.mountpoint / "job" / node).glob("step-*/rank-*/weights.pt")
        assert sorted(path.parent.name for path in held) == ["rank-00000"] * 2 + ["rank-00001"] * 2


DYING = """
import os, signal
import torch.distributed as dist
from cxlfs.job import Checkpointer, incoming, pieces
dist.init_process_group("gloo")
rank = dist.get_rank()
pieces.PIECE_BYTES = 1 << 16
take, taken = incoming.Incoming.take, []
def taking(self, parts, buffer):
    taken.append(len(parts))
    if rank == 1 and len(taken) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    take(self, parts, buffer)
incoming.Incoming.take = taking
def save(directory): (directory / "weights").write_bytes(bytes(4 << 20))
made = Checkpointer(f"{ROOT}/node{rank}", replicas=2, domain=f"node{rank}", deadline_seconds=20,
                    allow_volatile=True)
made.restore_from_checkpoint(lambda path: None)
made.deadline_seconds = 5
print(made.distributed_checkpoint(1, save))
"""


def test_a_node_that_dies_in_mid_copy(place: Workplace, tmp_path: Path) -> None:
    """The other hears so from the connection, and never votes for it. (No torchrun: it would end
    that one, too.)
    """
    root = place.mountpoint / "job"
    script = tmp_path / "die.py"
    script.write_text(f"ROOT = {str(root)!r}\n{DYING}", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": "2",
                "RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told, errors = ranks[0].communicate(timeout=100)
        ranks[1].communicate(timeout=100)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[1].returncode == -signal.SIGKILL
    assert re.search("copying to rank 1: rank 1: .*Connection (closed|reset) by peer", told), errors
    assert told.startswith("Aborted(")
    assert list((root / "node0").glob("step-*")) == []
    assert len(list((root / "node1").glob("step-*/rank-00000.tmp/weights"))) == 1


def test_agents_that_have_started_their_ranks_another_number_of_times(
    place: Workplace, tmp_path: Path
) -> None:
    """Of two nodes one's rank has failed: the other's agent begins its own again, uncounted."""
    program = f"""
import os
import torch.distributed as dist
from cxlfs.job import Checkpointer
dist.init_process_group("gloo")
os.environ |= {{"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": os.environ["RANK"]}}
made = Checkpointer("{place.mountpoint}/job", deadline_seconds=20, allow_volatile=True)
print(made.restore_from_checkpoint(lambda path: None))
dist.destroy_process_group()
"""
    assert run(program, tmp_path).count("Nothing()") == 2
