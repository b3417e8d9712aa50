"""The demo of a job proper; scripts/demo-job prepares what it needs and runs it.

It uses what every user has: the command ``cxlfs``, torchrun, a training script, and kill.

Exit status: 0 everything was as promised; 1 something was not; 69 this machine cannot make nodes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from demo_nodes import (
    MOUNTPOINT,
    MissingError,
    Node,
    NodeError,
    Switch,
    require_tools,
    terminate,
    wait_for,
    write_hosts,
)
from demo_run import DemoError, choose_directory, headline, interrupted, require, say

from cxlfs.media.room import file_system_of

TRAINER = Path(__file__).with_name("demo_job_train.py")
NODES = 4
STEPS, SAVE_EVERY = 12, 3
RESTARTS = 3
PATIENCE_SECONDS = 120.0
STOP_SECONDS = 40.0
TORCHRUN = (
    f"--nnodes={NODES}",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=node0:29400",
    "--monitor-interval=0.1",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    # Else processes that begin again find the addresses of those that are gone: docs/job.md.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
LOG_LINES = 30
KILLED = "a rank was killed"
EXIT_FAILED = 1
EXIT_MISSING = 69


@dataclasses.dataclass(frozen=True)
class Scene:
    """``fates``: at which moments of the protocol which rank is sent SIGKILL, one for each start
    (see tests/support/job_faults/moments.py); ``resumes``: from which steps the start behind the
    last of them may. ``loses``: what happens to a node while the job is down.
    """

    name: str
    title: str
    fates: tuple[tuple[int, str, str, int], ...] = ()
    resumes: tuple[int, ...] = ()
    loses: str = ""

    @property
    def keep(self) -> int:
        """All, where the demo looks for what came back into a store."""
        return STEPS // SAVE_EVERY if self.loses else 2

    def moments(self) -> str:
        names = ("rank", "what", "when", "count", "call")
        return json.dumps([dict(zip(names, (*fate, 3), strict=True)) for fate in self.fates])


SCENES = (
    Scene("prepare", "before PREPARE", ((0, "prepare", "before", 2),), (3,)),
    Scene("save", "while it saves", ((1, "Save", "inside", 2),), (3,)),
    Scene("copy", "while copies are on their way", ((3, "Replicate", "inside", 2),), (3,)),
    Scene("vote", "behind its vote", ((2, "WriteManifest", "behind", 2),), (3, 6)),
    Scene("votes", "between the votes", ((0, "vote tally", "before", 2),), (6,)),
    Scene("record", "while the commit is recorded", ((1, "RecordCommit", "inside", 2),), (6,)),
    Scene("collect", "while older ones are given back", ((3, "Collect", "inside", 3),), (9,)),
    Scene(
        "restore",
        "while it restores, killed in training before",
        ((1, "step", "before", 8), (2, "restore Load", "inside", 1)),
        (6,),
    ),
    Scene(
        "wiped",
        "while it saves; its node's store is lost",
        ((1, "Save", "inside", 2),),
        (3,),
        "store",
    ),
    Scene(
        "replaced",
        "while it saves; its node is replaced",
        ((2, "Save", "inside", 2),),
        (3,),
        "node",
    ),
)


@dataclasses.dataclass
class Row:
    """Of the summary."""

    title: str
    resumed: str
    fetched: str
    digest: str
    seconds: float


class Job:
    """One run of the training on these nodes: its processes, and what its ranks tell."""

    def __init__(self, nodes: list[Node], scene: Scene, work: Path, *, volatile: bool) -> None:
        self.nodes = nodes
        self.scene = scene
        self.root = MOUNTPOINT / scene.name
        self.told = work / f"told-{scene.name}"
        self.told.mkdir()
        self._volatile = volatile
        self._shown = [0] * NODES
        self._starts = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, restarts: int) -> None:
        self._starts += 1
        options = ["--told", self.told, "--steps", STEPS, "--save-every", SAVE_EVERY]
        options += ["--keep", self.scene.keep, "--fates", self.scene.moments()]
        options += ["--allow-volatile"] * self._volatile
        torchrun = [*TORCHRUN, f"--max-restarts={restarts}"]
        self.processes = [
            node.begin(
                *(sys.executable, "-m", "torch.distributed.run", *torchrun),
                *(f"--rdzv-id={self.scene.name}-{self._starts}", f"--local-addr={node.name}"),
                *(TRAINER, "--root", self.root, *options),
                log=self.log_of(node),
                environment=ENVIRONMENT,
            )
            for node in self.nodes
        ]

    def log_of(self, node: Node) -> Path:
        return self.told / f"log-{node.name}"

    def lines(self, rank: int) -> list[dict[str, object]]:
        path = self.told / f"rank-{rank}"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]

    def told_of(self, kind: str) -> list[list[dict[str, object]]]:
        rows = [self.lines(rank) for rank in range(NODES)]
        return [[line for line in row if line["kind"] == kind] for row in rows]

    def finish(self) -> None:
        """Shows what happens until all processes have ended well."""
        end = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() is None for process in self.processes):
            self.show()
            require(time.monotonic() < end, f"the job does not end\n{self.logs()}")
            time.sleep(0.1)
        self.show()
        statuses = [process.returncode for process in self.processes]
        require(not any(statuses), f"torchrun ended with {statuses}\n{self.logs()}")

    def until_killed(self) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not any(self.told_of("killed")):
            self.show()
            ended = [process.poll() for process in self.processes]
            require(None in ended, f"torchrun ended with {ended}\n{self.logs()}")
            require(time.monotonic() < end, f"nothing was killed\n{self.logs()}")
            time.sleep(0.05)
        self.show()

    def stop(self) -> None:
        """As who looks after the job does, when a node is lost."""
        for process in self.processes:
            if process.poll() is None:
                terminate(process)
        require(wait_for(self.processes, STOP_SECONDS), f"torchrun does not end\n{self.logs()}")

    def show(self) -> None:
        """What is new, of rank 0 where all say the same."""
        for rank in range(NODES):
            lines = self.lines(rank)
            for line in lines[self._shown[rank] :]:
                if line["kind"] == "killed":
                    say(f"  SIGKILL for rank {rank}, {line['when']} {line['what']}")
                elif line["kind"] == "began" and line["fetched"]:
                    say(f"  rank {rank} on {line['node']} got its shards from another node's store")
                elif line["kind"] == "began" and rank == 0 and line["step"]:
                    say(f"  resumed from step {line['step']}")
                elif line["kind"] == "committed" and rank == 0:
                    say(f"  step {line['step']} is committed")
                elif line["kind"] == "aborted":
                    say(f"  rank {rank}: step {line['step']} is aborted")
            self._shown[rank] = len(lines)

    def logs(self) -> str:
        tails = []
        for path in sorted(self.told.glob("log-*")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)


class Demo:
    """All of it: nodes, stores, jobs, and what was seen."""

    def __init__(self, work: Path, scenes: list[Scene], switch: Switch) -> None:
        self.work = work
        self.scenes = scenes
        self._switch = switch
        self.rows: list[Row] = []
        self.digests: dict[int, str] = {}
        """By step, of the run that nothing disturbed."""
        with (work / "probe").open("wb") as file:
            self._volatile = file_system_of(file.fileno()) == "tmpfs"
        self._made: list[Node] = []
        self.nodes: list[Node] = []
        self._job: Job | None = None

    def run(self) -> None:
        began = time.monotonic()
        self.make_nodes()
        headline("2. The training run, and nothing goes wrong")
        say(f"$ torchrun {' '.join(TORCHRUN)} --max-restarts={RESTARTS} {TRAINER.name}")
        self.play(Scene("undisturbed", "nothing"))
        for number, scene in enumerate(self.scenes, 3):
            headline(f"{number}. A rank is killed {scene.title}")
            self.play(scene)
        headline(f"{len(self.scenes) + 3}. Unmount and verify all stores")
        for node in self.nodes:
            node.unmount()
            told = node.cxlfs("verify", node.source).splitlines()
            say("\n".join(f"{node.name}: {line}" for line in told if line.startswith("clean")))
        self.summary(time.monotonic() - began)

    def make_nodes(self) -> None:
        headline(f"1. {NODES} nodes, each with a store mounted on {MOUNTPOINT}, and a network")
        write_hosts(self.work, NODES + 1)
        self.nodes = [self.a_node() for _ in range(NODES)]
        for line in self.nodes[0].cxlfs("status", MOUNTPOINT).splitlines()[:4]:
            say(f"  {line.strip()}")
        if self._volatile:
            say(f"  ({self.work} lies in memory: the job is told to accept that)")

    def a_node(self) -> Node:
        node = Node(len(self._made), self.work, self._switch)
        self._made.append(node)
        node.make_store()
        say(f"{node.name}  {node.address}  {node.source.name} on {MOUNTPOINT}")
        return node

    # --- a scene ----------------------------------------------------------------------------

    def play(self, scene: Scene) -> None:
        began = time.monotonic()
        job = self._job = Job(self.nodes, scene, self.work, volatile=self._volatile)
        job.start(0 if scene.loses else RESTARTS)
        if scene.loses:
            job.until_killed()
            self.lose(job, scene)
            job.start(RESTARTS)
        job.finish()
        row = self.judge(job, scene)
        row.seconds = time.monotonic() - began
        self.rows.append(row)
        if scene.loses:
            self.show_refilled(job)
        for node in self.nodes:
            shutil.rmtree(node.seen(job.root))

    def lose(self, job: Job, scene: Scene) -> None:
        """The store of the node that was killed, or that node."""
        at = scene.fates[0][0]
        lost = self.nodes[at]
        if scene.loses == "node":
            say(f"  {lost.name} loses its power, and does not come back")
            lost.power_off()
        job.stop()
        if scene.loses == "node":
            lost.source.unlink()
            self.nodes = job.nodes = [*(n for n in self.nodes if n is not lost), self.a_node()]
        else:
            say(f"  {lost.name} gets an empty store")
            lost.unmount()
            lost.make_store()

    def show_refilled(self, job: Job) -> None:
        """The step that was restored, in each store: its rank's shards, and a copy of another's."""
        (resumed,) = job.scene.resumes
        for node in self.nodes:
            found = node.seen(job.root).glob(f"step-{resumed:012d}.*/rank-*/manifest.json")
            ranks = sorted(path.parent.name for path in found)
            say(f"  {node.name} has of step {resumed}: {', '.join(ranks)}")
            require(len(ranks) == 2, f"{node.name} was not filled again")

    def judge(self, job: Job, scene: Scene) -> Row:
        """All ranks resumed from one step, and each step and the end are as undisturbed."""
        ended = [row[-1]["digest"] for row in job.told_of("ended") if row]
        require(len(ended) == NODES, f"{len(ended)} ranks came to the end\n{job.logs()}")
        require(len(set(ended)) == 1, f"ranks ended with {ended}")
        kills = sum(map(len, job.told_of("killed")))
        require(kills == len(scene.fates), f"{kills} kills instead of {len(scene.fates)}")
        last = [row[-1] for row in job.told_of("began")]
        (resumed,) = steps = {line["step"] for line in last}
        require(len(steps) == 1, f"ranks resumed from {steps}")
        if not scene.fates:
            saved = [line for row in job.told_of("committed") for line in row]
            self.digests = {line["step"]: line["digest"] for line in saved}  # type: ignore[misc]
        else:
            require(resumed in scene.resumes, f"resumed from {resumed}, not {scene.resumes}")
        for line in last if scene.fates else ():
            wanted = self.digests[line["step"]]  # type: ignore[index]
            require(line["digest"] == wanted, f"step {resumed} came back as another one")
        final = self.digests[STEPS]
        require(ended[0] == final, f"it ended with {ended[0]}, undisturbed with {final}")
        fetched = sum(bool(line["fetched"]) for line in last)
        require(bool(fetched) == bool(scene.loses), f"{fetched} ranks got shards of other stores")
        loss = job.told_of("ended")[0][-1]["loss"]
        same = "the same, bit for bit" if scene.fates else "on all ranks"
        say(f"  step {STEPS}, loss {loss:.4f}, digest of model and optimizer {final}: {same}")
        return Row(
            scene.title,
            f"step {resumed}" if scene.fates else "-",
            f"{fetched} of {NODES}" if scene.fates else "-",
            final,
            0.0,
        )

    # --- the end ----------------------------------------------------------------------------

    def summary(self, seconds: float) -> None:
        say("\n== Summary")
        width = max(len(KILLED), *(len(row.title) for row in self.rows))
        say(f"{KILLED:{width}}  resumed  fetched  ended with        seconds")
        for row in self.rows:
            cells = f"{row.resumed:7}  {row.fetched:7}  {row.digest}  {row.seconds:7.1f}"
            say(f"{row.title:{width}}  {cells}")
        told = f"{len(self.rows) - 1} times something went wrong, and {NODES} nodes ended with the"
        say(f"\n{told} same weights, bit for bit; {seconds:.0f} s")

    def clean_up(self) -> None:
        for node in self._made:
            node.power_off()
        self._switch.end()
        if self._job is not None:
            wait_for(self._job.processes, STOP_SECONDS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo-job", description="Show what a job of many nodes keeps."
    )
    names = [scene.name for scene in SCENES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--directory", type=Path, help="where to put the stores for the time")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    scenes = [one for one in SCENES if not arguments.only or one.name in arguments.only]
    work: Path | None = None
    try:
        require_tools()
        work = choose_directory(arguments.directory)
        demo = Demo(work, scenes, Switch())
        try:
            demo.run()
        finally:
            demo.clean_up()
    except MissingError as error:
        print(f"demo-job: {error}", file=sys.stderr)
        return EXIT_MISSING
    except (DemoError, NodeError) as error:
        print(f"demo-job: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
