"""Every inode of a store by its number, whether it is there as an object or still *asleep*.

Never here: what an inode is, which ones sleep and how they wake up (``sleepers``), names.

Invariants
- An inode that was asked for is an object from then on, the same one until it is dropped.
- Numbers, and how many there are, take no notice of who sleeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SleepingRows(NamedTuple):
    """What an image says of some that sleep: IMAGE_INODE_DTYPE, REF_DTYPE, and of each that has
    extended attributes its number and these.
    """

    inodes: npt.NDArray[np.void]
    references: npt.NDArray[np.void]
    xattrs: list[tuple[int, dict[bytes, bytes]]]


class Sleeping(Protocol[T_co]):
    """Inodes of a metadata image that nobody has asked for yet."""

    def __len__(self) -> int: ...

    def __contains__(self, ino: object) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    @property
    def row_count(self) -> int:
        """How many slept in the beginning."""
        ...

    @property
    def exported(self) -> int:
        """So many of those were taken down for the metadata image that was begun last."""
        ...

    def wake(self, ino: int) -> T_co | None:
        """Make the object, once; None: no such number sleeps."""
        ...

    def opened(self, lsn: int) -> None:
        """Everything up to that record was read from the media."""
        ...

    def begin_export(self, number: int) -> None:
        """Image ``number`` is begun."""
        ...

    def export(self, count: int) -> SleepingRows:
        """The next ``count`` for that image: what :meth:`rows` gives."""
        ...

    def rows(self, first: int, end: int) -> SleepingRows:
        """Of those of [first, end) that still sleep. Raises OutOfMemoryError."""
        ...


class Inodes(MutableMapping[int, T]):
    """Inodes by number; asking for one wakes it up."""

    def __init__(self) -> None:
        self._awake: dict[int, T] = {}
        self.get_awake = self._awake.get
        """The object of a number, if there is one."""
        self._sleeping: Sleeping[T] | None = None

    @property
    def sleeping(self) -> Sleeping[T] | None:
        return self._sleeping

    def put_to_sleep(self, sleeping: Sleeping[T]) -> None:
        """Those of an image, once, before anybody asks."""
        self._sleeping = sleeping

    def awake(self) -> Collection[T]:
        """Those that are objects: whatever was opened, changed or looked up, every directory, and
        all that differ from a plain file; see ``sleepers``.
        """
        return self._awake.values()

    def add_awake(self, inodes: Mapping[int, T]) -> None:
        """Some that are objects already, by number."""
        self._awake.update(inodes)

    @overload  # type: ignore[override]
    def get(self, ino: int) -> T | None: ...

    @overload
    def get(self, ino: int, default: T) -> T: ...

    def get(self, ino: int, default: T | None = None) -> T | None:
        inode = self._awake.get(ino)
        if inode is None and self._sleeping is not None:
            inode = self._wake(ino)
        return default if inode is None else inode

    def __getitem__(self, ino: int) -> T:
        inode = self.get(ino)
        if inode is None:
            raise KeyError(ino)
        return inode

    def _wake(self, ino: int) -> T | None:
        inode = None if self._sleeping is None else self._sleeping.wake(ino)
        if inode is not None:
            self._awake[ino] = inode
        return inode

    def __setitem__(self, ino: int, inode: T) -> None:
        self._awake[ino] = inode

    def __delitem__(self, ino: int) -> None:
        if ino not in self._awake:
            self._wake(ino)
        del self._awake[ino]

    def discard(self, ino: int) -> T | None:
        """Take one away; what it was."""
        return self._awake.pop(ino, None) if ino in self._awake else self.pop(ino, None)

    def __contains__(self, ino: object) -> bool:
        return ino in self._awake or (self._sleeping is not None and ino in self._sleeping)

    def __iter__(self) -> Iterator[int]:
        yield from list(self._awake)
        yield from self._sleeping or ()

    def __len__(self) -> int:
        return len(self._awake) + (0 if self._sleeping is None else len(self._sleeping))
