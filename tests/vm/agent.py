"""What runs inside the guest: uses cxlfs like a user, saves like a training script, and tells the
witness port about each thing it does before and after it does it.

Judges nothing but what direct_scenes does: what was found goes to the host, which knows what must
be there. Standard library only, but for the ways of saving that are about numpy and cxlfs.client.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.vm.ledger import content, digest

MOUNT_POINT = Path("/run/vm/mnt")
COMMAND_TIMEOUT_S = 240.0
STATE_ATTRIBUTE = "user.cxlfs.state"
MIB = 1 << 20
KEPT = 3
MEMORY_STORE_BYTES = 192 * MIB
EXIT_NOT_PERSISTENT = 15
EXIT_IN_USE = 11


class Witness:
    """Sends events; returns when the host has the line."""

    def __init__(self, port: str) -> None:
        self._fd = os.open(port, os.O_WRONLY)

    def send(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        os.close(self._fd)


class CommandFailedError(Exception):
    pass


# ------------------------------------------------------------------------------ ways to save


def save_bytes(path: Path, data: bytes, middle: Callable[[], None]) -> None:
    """In four pieces, as a serialiser writes."""
    piece = -(-len(data) // 4)
    with path.open("wb") as file:
        for start in range(0, len(data), piece):
            if start == 2 * piece:
                file.flush()
                middle()
            file.write(data[start : start + piece])


def save_numpy(path: Path, data: bytes, middle: Callable[[], None]) -> None:
    """With ``ndarray.tofile``, which writes through a duplicate of the descriptor and closes that
    in mid-file.
    """
    import numpy as np

    array = np.frombuffer(data, dtype=np.uint8)
    with path.open("wb") as file:
        array[: len(data) // 2].tofile(file)
        middle()
        array[len(data) // 2 :].tofile(file)


def save_words(path: Path, data: bytes, middle: Callable[[], None]) -> None:
    """One write for all of it, as torch.save does for one tensor; then a short tail."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(data)[: len(data) - 1000]
        while view:
            view = view[os.write(fd, view) :]
        middle()
        os.write(fd, data[len(data) - 1000 :])
    finally:
        os.close(fd)


def save_directly(path: Path, data: bytes, middle: Callable[[], None]) -> None:
    """With ``cxlfs.client``: stored by this process, in two leases at least."""
    from cxlfs import client

    before = client.counts().direct_bytes
    with client.open(path, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        middle()
        file.write(data[len(data) // 2 :])
    stored = client.counts().direct_bytes - before
    if stored != len(data):
        raise CommandFailedError(f"{stored} of {len(data)} bytes were stored directly: {path}")


class Saver:
    """Does the file operations of a training run, one at a time, each announced."""

    def __init__(
        self, witness: Witness, directory: Path, size: int, *, ways: str, hold_at: str
    ) -> None:
        """``ways``: of those to overwrite a file in place, the third is "numpy" or "direct";
        "all-direct": each file is written so.
        """
        self._witness, self._directory, self._size = witness, directory, size
        self._number = 0
        third = {"numpy": save_numpy, "direct": save_directly}.get(ways, save_bytes)
        self._in_place = (save_bytes, save_words, third)
        self._plain = save_bytes
        if ways == "all-direct":
            self._in_place = (save_directly,) * 3
            self._plain = save_directly
        self._hold_at = hold_at

    def _do(self, kind: str, path: str, act: Callable[[], object], **more: str | int) -> None:
        self._number += 1
        operation = {"number": self._number, "kind": kind, "path": path, **more}
        self._witness.send("begin", operation=operation)
        act()
        self._witness.send("done", number=self._number)

    def write(self, path: str, step: int, size: int, save: Callable[..., None]) -> None:
        seed = f"{path} {step}"
        data = content(seed, size)

        def middle() -> None:
            self._witness.send("middle", number=self._number, seed=seed)
            if seed == self._hold_at:
                signal.pause()  # the power cut comes here, half of the file written

        full = self._directory / path
        self._do("write", path, lambda: save(full, data, middle), seed=seed, size=size)

    def rename(self, path: str, target: str) -> None:
        old, new = self._directory / path, self._directory / target
        self._do("rename", path, lambda: old.replace(new), target=target)

    def remove_tree(self, path: str) -> None:
        for child in sorted((self._directory / path).iterdir()):
            name = f"{path}/{child.name}"
            self._do("remove", name, child.unlink)
        self._do("remove_directory", path, (self._directory / path).rmdir)

    def clear_leftovers(self) -> None:
        """What a cut left under a temporary name, as any script with a restart removes it."""
        for child in sorted(self._directory.glob("*.tmp")):
            if child.is_dir():
                self.remove_tree(child.name)
            else:
                self._do("remove", child.name, child.unlink)

    def step(self, step: int) -> None:
        """Overwrite one name in place; write a temporary file and rename it over an older one;
        every second step a folder of shards, renamed as a whole, the oldest one deleted.
        """
        self.write("latest.bin", step, self._size, self._in_place[step % 3])
        self.write("checkpoint.tmp", step, self._size // 2 + 8 * step, self._plain)
        self.rename("checkpoint.tmp", f"checkpoint-{step % KEPT}.bin")
        if step % 2:
            return
        self._do("make_directory", "shards.tmp", (self._directory / "shards.tmp").mkdir)
        for shard in range(2):
            self.write(f"shards.tmp/{shard}.bin", step, self._size // 8 + step, self._plain)
        self.rename("shards.tmp", f"shards-{step:04d}")
        kept = sorted(child.name for child in self._directory.glob("shards-*"))
        for old in kept[:-KEPT]:
            self.remove_tree(old)


# ------------------------------------------------------------------------------------ the agent


def entries(directory: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """(path, what is there) of everything below ``directory``; every byte is read."""
    for folder, folders, files in os.walk(directory):
        for name in folders:
            path = Path(folder, name)
            yield str(path.relative_to(directory)), {"size": -1, "digest": "", "state": ""}
        for name in files:
            path = Path(folder, name)
            data = path.read_bytes()
            state = os.getxattr(path, STATE_ATTRIBUTE).decode()
            found = {"size": len(data), "digest": digest(data), "state": state}
            yield str(path.relative_to(directory)), found


class Agent:
    def __init__(self, program: str, source: str, witness: Witness, size: int) -> None:
        self._program, self._source, self._witness = program, source, witness
        self._size = size

    def _run(self, *arguments: str, expected: int = 0) -> str:
        self._witness.send("running", command=arguments[0])
        command = [self._program, *arguments]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
            )
            status, out, err = ended.returncode, ended.stdout, ended.stderr
        except subprocess.TimeoutExpired as late:
            status, out = -1, (late.stdout or b"").decode(errors="replace")
            err = f"did not end, or did not close its output, in {COMMAND_TIMEOUT_S:.0f} s"
        self._witness.send("ran", arguments=arguments, status=status, out=out, err=err)
        if status != expected:
            raise CommandFailedError(
                f"cxlfs {' '.join(arguments)}: exit status {status}, not {expected}\n{out}{err}"
            )
        return out

    def make(self, size: str) -> None:
        self._run("mkfs", self._source, "--label", "vm", *(["--size", size] if size else []))

    def mount(self) -> None:
        MOUNT_POINT.mkdir(exist_ok=True)
        self._run("mount", self._source, str(MOUNT_POINT))

    def unmount(self) -> None:
        self._run("umount", str(MOUNT_POINT))

    def status(self) -> None:
        report = json.loads(self._run("status", str(MOUNT_POINT), "--json"))
        self._witness.send("status", report=report)

    def verify(self, where: str) -> None:
        self._run("verify", str(MOUNT_POINT) if where == "mounted" else self._source)

    def list(self) -> None:
        self._witness.send("listing", entries=dict(entries(MOUNT_POINT)))

    def save(self, first: str, last: str, ways: str = "", hold_at: str = "") -> None:
        saver = Saver(self._witness, MOUNT_POINT, self._size, ways=ways, hold_at=hold_at)
        module = "numpy" if ways == "numpy" else "cxlfs.client"
        importlib.import_module(module)  # takes seconds in an emulated CPU: not in mid-save
        self._witness.send("saving")
        saver.clear_leftovers()
        for step in range(int(first), int(last) + 1):
            saver.step(step)
        self._witness.send("saved")

    def refuse(self) -> None:
        """A volatile device-dax region must be refused, and must not change."""
        for dax in sorted(Path("/sys/bus/dax/devices").iterdir()):
            if "/ndbus" not in str(dax.resolve()):
                node = f"/dev/{dax.name}"
                self._run("mkfs", node, "--force", expected=EXIT_NOT_PERSISTENT)
                self._witness.send("refused", node=node)

    def refuse_system_memory(self) -> None:
        """The persistent device, lent to the kernel as memory and taken back."""
        name = Path(self._source).name
        # daxctl lends no memory that the kernel would use at once, and never give back.
        Path("/sys/devices/system/memory/auto_online_blocks").write_text("offline")
        for mode, more in (("system-ram", ["--no-online"]), ("devdax", [])):
            command = ["daxctl", "reconfigure-device", *more, "--mode", mode, name]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode != 0:
                raise CommandFailedError(f"{' '.join(command)}: {ended.stdout}{ended.stderr}")
            if mode == "system-ram":
                self._run("mkfs", self._source, "--force", expected=EXIT_IN_USE)
                self._witness.send("in_use", what="system memory")

    def refuse_mapped(self) -> None:
        """The device, while a process that knows nothing of cxlfs has it mapped."""
        with Path(self._source).open("r+b") as file, mmap.mmap(file.fileno(), 2 * MIB):
            self._run("mkfs", self._source, "--force", expected=EXIT_IN_USE)
        self._witness.send("in_use", what="mapped")

    def refuse_mounted(self) -> None:
        """What holds a mounted store: its source, and the device that its file system lies on."""
        device = os.environ["VM_DEVICE"]
        for source in dict.fromkeys((self._source, device)):
            self._run("mkfs", source, "--force", expected=EXIT_IN_USE)
            self._witness.send("in_use", what=source)

    def direct(self) -> None:
        """What programs do by themselves: see there."""
        self._scenes(MOUNT_POINT, self._source)

    def _scenes(self, mount_point: Path, source: str, place: str = "") -> None:
        from tests.vm.direct_scenes import SceneError, Scenes

        def tell(scene: str, facts: dict[str, object]) -> None:
            self._witness.send("scene", scene=place + scene, facts=facts)

        scenes = Scenes(mount_point, source, self._run, tell)
        try:
            if place:
                scenes.play_in_memory()
            else:
                scenes.play()
        except (SceneError, OSError) as error:
            raise CommandFailedError(traceback.format_exc()) from error

    def direct_in_memory(self) -> None:
        """The same where the pages are large: on tmpfs with huge=always, and on hugetlbfs."""
        Path("/proc/sys/vm/nr_hugepages").write_text(str(MEMORY_STORE_BYTES // (2 * MIB)))
        for system, options in (("tmpfs", "huge=always"), ("hugetlbfs", "pagesize=2M")):
            folder, mount_point = Path("/run/vm", system), Path("/run/vm", f"mnt-{system}")
            folder.mkdir()
            mount_point.mkdir()
            subprocess.run(["mount", "-t", system, "-o", options, system, folder], check=True)
            source = str(folder / "store")
            self._run("mkfs", source, "--size", str(MEMORY_STORE_BYTES))
            self._run("mount", source, str(mount_point))
            self._scenes(mount_point, source, f"{system}: ")
            self._run("umount", str(mount_point))
            self._run("verify", source)
            Path(source).unlink()

    def act(self, action: str) -> None:
        name, *arguments = action.split(":")
        getattr(self, name)(*arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=MIB, help="bytes of the larger checkpoints")
    parser.add_argument("--program", default="cxlfs", help="the cxlfs command")
    parser.add_argument("actions", nargs="+", help="make:SIZE mount save:FIRST:LAST list ...")
    arguments = parser.parse_args()
    directory = os.environ["VM_DIRECTORY"]
    source = f"{directory}/store" if directory else os.environ["VM_DEVICE"]
    witness = Witness(os.environ["VM_WITNESS"])
    try:
        agent = Agent(arguments.program, source, witness, arguments.size)
        for action in arguments.actions:
            agent.act(action)
    except CommandFailedError as error:
        witness.send("failed", message=str(error))
        return 1
    finally:
        witness.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
