"""Many files, made past the verbs and the journal for the image that follows: a million in some
seconds instead of some minutes.

Never here: anything that is measured.
"""

from __future__ import annotations

import time

from cxlfs.native.maps import FileMap
from cxlfs.store import Store
from cxlfs.store.namespace import Inode


def put_files(store: Store, parent: int, name: bytes, count: int) -> list[int]:
    """Empty files of the caller, their names made of ``name`` and a number (``b"file-%07d"``);
    returns their inode numbers. They are lost unless a rollover follows.
    """
    namespace, now_ns, inos = store.namespace, time.time_ns(), []
    owner = namespace.get(parent)
    for index in range(count):
        ino = namespace.allocate_ino()
        inode = Inode(ino, 0o100644, owner.uid, owner.gid, 0, 0, *[now_ns + index] * 4)
        inode.live = FileMap(store.volume.engine, owner=ino)
        inode.live.take_delta().apply(inode.live, None)
        namespace.add(inode)
        namespace.link(parent, name % index, ino)
        inos.append(ino)
    return inos
