"""What those who serve requests tell those who serve file data; and the data plane of a mount whose
data pyfuse3's handlers serve, too.

Never here: threads (``workers``), what a request means (``requests``).
"""

from __future__ import annotations

from typing import Protocol

import pyfuse3


class DataPlane(Protocol):
    """What ``requests`` tells whoever serves file data."""

    @property
    def direct_mapping(self) -> bool:
        """Files that bypass the kernel's page cache can be mapped all the same."""
        ...

    @property
    def writes_past_store(self) -> bool:
        """It makes use of :meth:`allow_writes`."""
        ...

    def opened(self, handle: int, ino: int, *, readable: bool) -> None:
        """Raises OutOfMemoryError: the handle is not known then."""
        ...

    def released(self, handle: int, ino: int) -> None: ...

    def allow_writes(self, handle: int, tid: int) -> None:
        """Writes of this thread need not be told any more, until ``Inode.stop_writes``."""
        ...

    def note_absent(self, parent: int, name: bytes) -> None:
        """A name means nothing: who asks for it need not be told of it, until it is taken back."""
        ...

    def take_absent_back(self, parent: int, name: bytes) -> None:
        """A name may mean something. Nobody is being told otherwise when this returns."""
        ...

    def take_all_absent_back(self) -> None:
        """The same of all names."""
        ...

    def describe(self) -> dict[str, object]:
        """For ``cxlfs status``: kind, and counts where there are any."""
        ...

    def invalidate(self, ino: int, attributes_only: bool) -> None:  # noqa: FBT001
        """Make the kernel forget what it caches of ``ino``. Waits for requests, unless it is only
        about attributes. Raises OSError.
        """
        ...

    def invalidate_name(self, parent: int, name: bytes) -> None:
        """Make the kernel forget what it knows of a name. Waits for requests. Raises OSError."""
        ...


class HandlersOnly:
    """pyfuse3's handlers serve everything: there is nothing to tell."""

    direct_mapping = False
    writes_past_store = False

    def opened(self, handle: int, ino: int, *, readable: bool) -> None: ...

    def released(self, handle: int, ino: int) -> None: ...

    def allow_writes(self, handle: int, tid: int) -> None: ...

    def note_absent(self, parent: int, name: bytes) -> None: ...

    def take_absent_back(self, parent: int, name: bytes) -> None: ...

    def take_all_absent_back(self) -> None: ...

    def describe(self) -> dict[str, object]:
        return {"kind": "pyfuse3"}

    def invalidate(self, ino: int, attributes_only: bool) -> None:  # noqa: FBT001
        pyfuse3.invalidate_inode(pyfuse3.InodeT(ino), attributes_only)

    def invalidate_name(self, parent: int, name: bytes) -> None:
        pyfuse3.invalidate_entry(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name))
