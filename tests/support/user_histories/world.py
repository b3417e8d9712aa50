"""A store and its model: each verb is done to both, as a process of a user.

Other modules choose what is done (``programs``), and when (``run``).

Invariants
- A verb that the model cannot do is not tried on the store: it raises Refused.
- Time is the world's: it moves a little with each verb, and otherwise when told.
"""

from __future__ import annotations

import dataclasses
import os

from cxlfs.errors import NotPermittedError
from cxlfs.store.unit_rules import Ending
from tests.support.user_histories.model import Directory, File, Process, is_torn
from tests.support.user_histories.settling import Settles


def _saver_of(path: bytes) -> bytes:
    """The directory of a saver that a path leads into; empty: none."""
    parts = path.split(b"/")
    inside = len(parts) > 2 and not parts[1].startswith(b"m-")
    return parts[1] if inside else b""


class Refused(Exception):  # noqa: N818 - what a program is told
    """The verb fails, as it would on any file system."""


@dataclasses.dataclass(eq=False, slots=True)
class Handle:
    number: int
    file: File
    above: Directory
    name: bytes
    process: Process


class World(Settles):
    """Verbs over paths like ``run/checkpoint-1/shard-0``."""

    def __init__(self, *, crosses: bool = False) -> None:
        """``crosses``: names move into savers' directories, out of them and from one to another."""
        super().__init__()
        self.crosses = crosses
        self.handles: list[Handle] = []

    def _require_way(self, path: bytes, new: bytes) -> None:
        if not self.crosses and _saver_of(path) != _saver_of(new):
            raise Refused(new)

    # --- finding --------------------------------------------------------------------------------

    def find(self, path: bytes) -> File | Directory | None:
        return self.root.find(tuple(filter(None, path.split(b"/"))))

    def directory(self, path: bytes) -> Directory:
        found = self.find(path)
        if not isinstance(found, Directory):
            raise Refused(path)
        return found

    def _split(self, path: bytes) -> tuple[Directory, bytes]:
        above, _, name = path.rpartition(b"/")
        return self.directory(above), name

    def _child(self, path: bytes) -> tuple[Directory, bytes, File | Directory]:
        above, name = self._split(path)
        child = above.entries.get(name)
        if child is None:
            raise Refused(path)
        return above, name, child

    def _file(self, path: bytes) -> tuple[Directory, bytes, File]:
        above, name, child = self._child(path)
        if not isinstance(child, File):
            raise Refused(path)
        return above, name, child

    # --- names ----------------------------------------------------------------------------------

    def make_directory(self, process: Process, path: bytes) -> Directory:
        above, name = self._split(path)
        if name in above.entries:
            raise Refused(path)
        self.begin(process, f"mkdir {path.decode()}")
        made = Directory(0, process.uid, name, above)
        self.making(above, name, made)
        made.ino = self.store.make_directory(above.ino, name, 0o777, process.uid, process.uid).ino
        above.put(name, made)
        self.end()
        return made

    def remove_directory(self, process: Process, path: bytes) -> None:
        above, name, child = self._child(path)
        if not isinstance(child, Directory) or child.entries:
            raise Refused(path)
        self.begin(process, f"rmdir {path.decode()}")
        self.changing(above, name)
        self.removing(child)
        self.store.remove_directory(above.ino, name)
        del above.entries[name]
        self.end()

    def unlink(self, process: Process, path: bytes) -> None:
        above, name, _ = self._file(path)
        self.begin(process, f"unlink {path.decode()}")
        self.clearing(above, name)
        self.changing(above, name)
        self.unlinking(above, name)
        self.store.unlink(above.ino, name)
        del above.entries[name]
        self.end()

    def link(self, process: Process, path: bytes, new: bytes) -> None:
        self._require_way(path, new)
        _, _, file = self._file(path)
        above, name = self._split(new)
        if name in above.entries or file.is_dirty:
            raise Refused(new)
        self.begin(process, f"link {path.decode()} {new.decode()}")
        self.changing(above, name)
        self.store.link(file.ino, above.ino, name)
        self.linking(file, path, above, name)
        above.put(name, file)
        file.is_linked = True
        self.named(above, name, file)
        self.end()

    def rename(self, process: Process, path: bytes, new: bytes, *, exchange: bool = False) -> None:
        self._require_way(path, new)
        old_above, old_name, child = self._child(path)
        above, name = self._split(new)
        other = above.entries.get(name)
        if isinstance(child, Directory) and (other is not None or above.is_in(child)):
            raise Refused(new)
        if isinstance(other, Directory) or other is child or (exchange and other is None):
            raise Refused(new)
        if isinstance(child, File) and child.is_dirty:
            raise Refused(path)
        verb = "exchange" if exchange else "rename"
        self.begin(process, f"{verb} {path.decode()} {new.decode()}")
        self.changing(old_above, old_name)
        self.changing(above, name)
        (self.losing if exchange else self.dying)(above, name)
        self.store.rename(old_above.ino, old_name, above.ino, name, exchange=exchange)
        self.moving(child, old_above, old_name, above, name)
        if exchange and other is not None:
            self.moving(other, above, name, old_above, old_name)
        del old_above.entries[old_name]
        above.put(name, child)
        self.named(above, name, child)
        if exchange and other is not None:
            old_above.put(old_name, other)
            self.named(old_above, old_name, other)
        self.end()

    def set_mode(self, process: Process, path: bytes, mode: int) -> None:
        above, name, file = self._file(path)
        if file.is_dirty:
            raise Refused(path)
        self.begin(process, f"chmod {mode:o} {path.decode()}")
        del above, name
        self.store.set_attributes(file.ino, mode=mode)
        file.mode = mode
        self.end()

    # --- contents -------------------------------------------------------------------------------

    def create(
        self, process: Process, path: bytes, data: bytes, *, appends: bool = False
    ) -> Handle:
        """A new file, with its first bytes."""
        above, name = self._split(path)
        if name in above.entries:
            raise Refused(path)
        self.begin(process, f"create {path.decode()}, {len(data)} bytes{' of a log' * appends}")
        self.changing(above, name, appends=appends)
        flags = os.O_RDWR | (os.O_APPEND if appends else 0)
        made, number = self.store.create(above.ino, name, 0o666, process.uid, process.uid, flags)
        self.store.write(number, 0, data)
        file = File(made.ino, process.uid, data, is_dirty=True, is_log=appends, handles=1)
        file.made = self.moment
        above.put(name, file)
        if appends:
            self.set_apart(above, file)
        return self._opened(Handle(number, file, above, name, process))

    def open(
        self, process: Process, path: bytes, data: bytes, *, empties: bool, appends: bool = False
    ) -> Handle:
        """Open a file, and store its first bytes: over it, at its beginning, or at its end."""
        above, name, file = self._file(path)
        if file.handles:
            raise Refused(path)
        if not empties:
            file.held = None  # a change in place is nobody's torn save
        how = "O_TRUNC" if empties else "O_APPEND" if appends else "in place"
        self.begin(process, f"open {path.decode()} {how}, {len(data)} bytes")
        file.is_log = appends
        if appends:
            self.set_apart(above, file)
        else:
            self.changing(above, name, file)
        flags = os.O_WRONLY | (os.O_TRUNC if empties else 0) | (os.O_APPEND if appends else 0)
        number = self.store.open_file(file.ino, flags)
        at = len(file.live) if appends else 0
        if data:
            self.store.write(number, at, data)
        file.live = b"" if empties else file.live
        file.live = file.live[:at] + data + file.live[at + len(data) :]
        file.is_dirty = file.is_dirty or bool(data) or empties
        file.handles += 1
        file.is_emptied = file.is_emptied or empties
        return self._opened(Handle(number, file, above, name, process))

    def _opened(self, handle: Handle) -> Handle:
        self.handles.append(handle)
        self.end()
        return handle

    def write(self, handle: Handle, data: bytes) -> None:
        """At the end."""
        file = handle.file
        self.begin(handle.process, f"write {handle.name.decode()}, {len(data)} bytes")
        if not (file.is_log or file.is_dirty):  # else the change goes on, and its end is one
            self._changing(handle)
        try:
            self.store.write(handle.number, len(file.live), data)
        except NotPermittedError as error:  # it went back, or its directory did
            raise Refused(handle.name) from error
        file.live += data
        file.is_dirty = True
        self.end()

    def _changing(self, handle: Handle) -> None:
        if handle.above.entries.get(handle.name) is handle.file:
            self.changing(handle.above, handle.name, handle.file)
            return
        for above, name in self.names_of(handle.file):
            self.changing(above, name, handle.file)

    def fsync(self, handle: Handle) -> None:
        self.begin(handle.process, f"fsync {handle.name.decode()}")
        self.store.fsync(handle.number)
        self._publish(handle)
        self.end()

    def close(self, handle: Handle, *, killed: bool = False) -> None:
        self.handles.remove(handle)
        self.begin(handle.process, f"close {handle.name.decode()}{' by its kill' * killed}")
        self.store.flush(handle.number, writer_killed=killed)
        self.store.release(handle.number)
        file = handle.file
        file.handles -= 1
        file.closed_at = self.now
        if not killed:
            self._publish(handle)
            for above, name in self.names_of(file):
                self.closed(above, name, file)
        elif file.is_dirty:
            if file.is_emptied and file.committed is not None:
                file.live = file.committed
                file.overwriters |= {handle.process} if file.held is not None else set()
            elif file.held is not None and handle.process in file.overwriters:
                file.live = file.committed = file.held
                file.held = None
            else:
                file.committed = file.live
                self.published_by_kill(file)
            file.is_dirty = file.is_emptied = False
            for above, name in self.names_of(file):
                self.spoil(above, name, file)
        self.end()

    def _publish(self, handle: Handle) -> None:
        file = handle.file
        if not file.is_dirty:
            return
        old = file.committed
        if file.is_emptied and old:
            file.held = file.held if file.held is not None and is_torn(old) else old
            file.overwriters.add(handle.process)
            file.ended_at = None
        file.committed, file.born = file.live, self.moment
        file.is_dirty = file.is_emptied = False
        names = list(self.names_of(file))
        self.note_publisher(file, names)
        for above, name in names:
            self.published(above, name, file)
        if not names:
            self.published_without_name(file)

    # --- ends -----------------------------------------------------------------------------------

    def exit(self, process: Process, ending: Ending) -> None:
        """A process ends. What it has open is closed: by the kernel, or by itself."""
        self.trace.append(f"{process.name}: {ending.value}")
        mine = [handle for handle in self.handles if handle.process == process]
        if ending is Ending.KILLED:
            self.endings[process] = ending
        for handle in mine:
            self.close(handle, killed=ending is Ending.KILLED)
        self.endings[process] = ending
        self.settle()

    def restart(self, *, clean: bool) -> None:
        if not clean:
            self._forget_open()
        super().restart(clean=clean)
        self.handles.clear()

    def _forget_open(self) -> None:
        """A crash loses what is open and has no name."""
        named = {file for _, file in self.root.below()}
        for file in [handle.file for handle in self.handles if handle.file not in named]:
            begun = (file.live, file.committed or b"")
            self.ever_committed = {
                content
                for content in self.ever_committed
                if not any(each.startswith(content) for each in begun)
            }

    def wait(self, seconds: float) -> None:
        self.trace.append(f"{seconds} s pass")
        self.now += seconds
        self.settle()
