"""What the verbs of a store tell checkpoint units, and what they are told by a store without any.

Never here: anything that is done about it (``units``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cxlfs.format.operations import Operation
    from cxlfs.store.namespace import Inode

    Named = tuple[int, bytes, Inode]
    """Directory and name, and what gets it."""


class Transition(Protocol):
    """What a verb's own record says of units, besides; :meth:`stored` when that record is."""

    @property
    def operations(self) -> Sequence[Operation]: ...

    def stored(self) -> None: ...


class KeptContent(Protocol):
    """What a unit keeps of a content, in the record that publishes another one."""

    @property
    def operations(self) -> Sequence[Operation]: ...

    def done(self) -> None: ...

    def cancel(self) -> None: ...


class UnitHooks(Protocol):
    """``active``: whether the other methods have to be called at all. See ``units``."""

    active: bool

    def changing(
        self,
        directory: Inode,
        name: bytes | None,
        *,
        removing: bool,
        given: Inode | None = None,
    ) -> None: ...

    def unlinking(self, directory: Inode, name: bytes) -> None: ...

    def changing_content(self, inode: Inode, *, in_steps: bool = False) -> bool: ...

    def making(self, parent: Inode, name: bytes, made: Inode) -> Transition: ...

    def removing(self, directory: Inode) -> Transition: ...

    def naming(self, names: Sequence[Named], replaced: Inode | None = None) -> Transition: ...

    def dying(self, directory: Inode, name: bytes, inode: Inode) -> list[Operation]: ...

    def moving(
        self, inode: Inode, directory: Inode, name: bytes, target: Inode, new_name: bytes
    ) -> list[Operation]: ...

    def linking(self, inode: Inode, directory: Inode, name: bytes) -> list[Operation]: ...

    def keeping(self, inode: Inode) -> KeptContent | None: ...

    def publishing(self, inode: Inode, parent: int, name: bytes) -> None: ...

    def is_unwritten_marker(self, inode: Inode) -> bool: ...

    def published(
        self, inode: Inode, *, incomplete: bool, moves: bool = False, whole: bool = True
    ) -> None: ...

    def linked(self, inode: Inode) -> None: ...

    def spoil(self, inode: Inode, *, reverted: bool = False) -> None: ...


class NoTransition:
    """Nothing."""

    operations: Sequence[Operation] = ()

    def stored(self) -> None: ...


NO_TRANSITION = NoTransition()


class NoUnits:
    """A store that has none."""

    active = False

    def changing(
        self,
        directory: Inode,
        name: bytes | None,
        *,
        removing: bool,
        given: Inode | None = None,
    ) -> None: ...

    def unlinking(self, directory: Inode, name: bytes) -> None: ...

    def changing_content(self, inode: Inode, *, in_steps: bool = False) -> bool:
        del inode, in_steps
        return False

    def making(self, parent: Inode, name: bytes, made: Inode) -> Transition:
        del parent, name, made
        return NO_TRANSITION

    def removing(self, directory: Inode) -> Transition:
        del directory
        return NO_TRANSITION

    def naming(self, names: Sequence[Named], replaced: Inode | None = None) -> Transition:
        del names, replaced
        return NO_TRANSITION

    def dying(self, directory: Inode, name: bytes, inode: Inode) -> list[Operation]:
        del directory, name, inode
        return []

    def moving(
        self, inode: Inode, directory: Inode, name: bytes, target: Inode, new_name: bytes
    ) -> list[Operation]:
        del inode, directory, name, target, new_name
        return []

    def linking(self, inode: Inode, directory: Inode, name: bytes) -> list[Operation]:
        del inode, directory, name
        return []

    def keeping(self, inode: Inode) -> KeptContent | None:
        del inode
        return None

    def publishing(self, inode: Inode, parent: int, name: bytes) -> None: ...

    def is_unwritten_marker(self, inode: Inode) -> bool:
        del inode
        return False

    def published(
        self, inode: Inode, *, incomplete: bool, moves: bool = False, whole: bool = True
    ) -> None: ...

    def linked(self, inode: Inode) -> None: ...

    def spoil(self, inode: Inode, *, reverted: bool = False) -> None: ...
