"""An engine, the model of it, and what random programs do to both: after every step they agree."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest

from cxlfs.errors import BeyondDataError, InvalidArgumentError
from cxlfs.native.discards import drop_discarded
from cxlfs.native.extents import Delta, Engine, FileMap
from tests.native.extent_model import ModelExtent, ModelMap, Ref
from tests.support.extents import (
    FIRST,
    HEADER_BYTES,
    Room,
    alive,
    copy_extent,
    import_maps,
    re_aim,
)

LIMIT = 1 << 15
SEGMENT = 1 << 16
SEGMENTS = 48
FILES = 5


class Pending:
    """A delta that has not ended, and what it was taken from."""

    def __init__(self, delta: Delta, snapshot: ModelMap, older: ModelMap) -> None:
        self.delta = delta
        self.snapshot = snapshot
        self.older = older
        self.extents = {int(i): int(n) for i, n in delta.extents[["id", "length"]].tolist()}


class File:
    """Live and committed content; ``replayed`` is the committed one in the engine that only
    knows what records said.
    """

    def __init__(self, owner: int, live: FileMap, committed: FileMap, replayed: FileMap) -> None:
        self.owner = owner
        self.live = live
        self.committed = committed
        self.replayed = replayed
        self.model = ModelMap(LIMIT)
        self.committed_model = ModelMap(LIMIT)
        self.pending: Pending | None = None


class Machine:
    """Engine, model, and a second engine fed with records alone."""

    def __init__(self, place: Room, rng: random.Random) -> None:
        self.place = place
        self.rng = rng
        self.engine = place.engine
        self.replay: Engine = place.another_engine()
        self.extents: dict[int, ModelExtent] = {}
        self.known: dict[int, int] = {}
        self.files: list[File] = []
        self.alive_before: dict[int, int] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.copies: list[FileMap] = []
        """Of live contents, in the making."""
        self.owner = 0
        for _ in range(FILES):
            self.new_file()

    # --- helpers ----------------------------------------------------------------------------

    def new_file(self) -> None:
        self.owner += 1
        maps = [FileMap(e, owner=self.owner) for e in (self.engine, self.engine, self.replay)]
        self.files.append(File(self.owner, *maps))

    def pick_range(self, size: int) -> tuple[int, int]:
        rng = self.rng
        length = rng.choice([1, 7, 64, 500, 4095, 4096, 5000, 9000, 20000])
        length = rng.randint(1, length)
        offset = rng.choice([0, size, rng.randrange(LIMIT), rng.randrange(LIMIT) // 4096 * 4096])
        offset = min(offset, LIMIT - 1)
        return offset, min(length, LIMIT - offset)

    def open_lease(self, file: File, needed: int) -> None:
        wanted = self.rng.choice([8256, 8256 + self.rng.randrange(9000), 30000])
        if self.rng.random() < 0.2:
            wanted = max(8256, min(needed, SEGMENT - HEADER_BYTES))
        extent_id = self.open_extent(wanted)
        file.live.attach_lease(extent_id)
        file.model.lease = self.extents[extent_id]

    def open_extent(self, wanted: int) -> int:
        offset, capacity = self.place.cut(wanted)
        self.place.next_id += 1
        extent_id = self.place.next_id
        self.engine.lease(extent_id, offset, capacity)
        self.extents[extent_id] = ModelExtent(extent_id, offset, capacity)
        return extent_id

    def close_lease(self, file: File) -> None:
        lease = file.model.lease
        offset, length = file.live.close_lease()
        if lease is None:
            assert length == 0
            return
        end = lease.media_offset + lease.capacity
        start = min(-(-(lease.media_offset + lease.length) // 64) * 64, end)
        assert (offset, length) == (start, end - start)
        lease.open = False
        lease.capacity = lease.length
        file.model.lease = None

    # --- steps ------------------------------------------------------------------------------

    def write(self, file: File) -> None:
        offset, length = self.pick_range(file.model.size)
        data = self.rng.randbytes(length)
        done = 0
        while done < length:
            expected = file.model.write(offset + done, data[done:])
            assert file.live.write(offset + done, data, done) == expected
            done += expected[0]
            if expected[0] == 0:
                self.close_lease(file)
                self.open_lease(file, expected[1])

    def write_sequence(self, file: File) -> None:
        """Appends that continue each other."""
        for _ in range(self.rng.randint(1, 6)):
            offset = file.model.size
            data = self.rng.randbytes(min(self.rng.randint(1, 3000), LIMIT - offset))
            if not data or file.model.lease is None:
                return
            expected = file.model.write(offset, data)
            assert file.live.write(offset, data) == expected

    def read(self, file: File) -> None:
        offset, length = self.pick_range(file.model.size)
        length = min(length * 3, LIMIT)
        for content, model in ((file.live, file.model), (file.committed, file.committed_model)):
            expected = model.data[offset : max(min(offset + length, model.size), offset)].tobytes()
            assert bytes(content.read(offset, length)) == expected
            assert bytes(content.read(offset, length, verify=False)) == expected
            refs = model.refs(offset, min(offset + length, model.size)) if expected else []
            view = content.peek(offset, length)
            if len(refs) == 1 and refs[0][1] == len(expected):
                assert view is not None
                assert view.tobytes() == expected
            else:
                assert view is None

    def punch(self, file: File) -> None:
        offset, length = self.pick_range(file.model.size)
        file.live.punch(offset, length)
        file.model.punch(offset, length)

    def share(self, file: File) -> None:
        """Any range of any live content, to any place of another or the same."""
        source = self.rng.choice(self.files)
        offset, length = self.pick_range(source.model.size)
        target_offset, length = self.pick_range(file.model.size)[0], length * 2
        length = min(length, LIMIT - target_offset)
        in_file = max(0, min(length, source.model.size - offset))
        if source is file and in_file and abs(offset - target_offset) < in_file:
            with pytest.raises(InvalidArgumentError):
                source.live.share(offset, length, file.live, target_offset)
            return
        named = set(np.unique(source.model.extent[offset : offset + in_file]).tolist()) - {0}
        if any(self.extents[e].open for e in named):
            assert source.live.share(offset, length, file.live, target_offset) is None
            for other in self.files:
                self.close_lease(other)
        expected = source.model.share(offset, length, file.model, target_offset)
        assert source.live.share(offset, length, file.live, target_offset) == expected

    def look(self, file: File) -> None:
        """Where data and holes are, and how much of a range is data."""
        model, (offset, length) = file.model, self.pick_range(file.model.size)
        for hole in (False, True):
            expected = model.seek(offset, hole=hole)
            if expected is None:
                with pytest.raises(BeyondDataError):
                    file.live.seek(offset, hole=hole)
            else:
                assert file.live.seek(offset, hole=hole) == expected
        rows = model.refs(offset, max(offset, min(offset + length, model.size)))
        assert file.live.mapped(offset, length) == (sum(r[1] for r in rows), len(rows))

    def truncate(self, file: File) -> None:
        size = self.rng.choice([0, self.rng.randrange(LIMIT), file.model.size])
        file.live.truncate(size)
        file.model.truncate(size)

    def replace_live(self, file: File) -> None:
        """A revert, or a new beginning."""
        if file.pending is not None:
            self.end_delta(file)
        self.close_lease(file)
        file.live.close()
        if self.rng.random() < 0.5:
            file.live, file.model = file.committed.clone(), file.committed_model.clone()
        else:
            file.live, file.model = FileMap(self.engine, owner=file.owner), ModelMap(LIMIT)

    def copy_live(self, file: File) -> None:
        """Another file gets the live content, whether it is published or not."""
        other = self.rng.choice([f for f in self.files if f is not file])
        if other.pending is not None:
            self.end_delta(other)
        for each in self.files:
            self.close_lease(each)
        other.live.close()
        other.live, other.model = FileMap(self.engine, owner=other.owner), ModelMap(LIMIT)
        size = file.model.size
        assert file.live.share(0, size, other.live, 0) == size
        file.model.share(0, size, other.model, 0)

    def take_delta(self, file: File) -> None:
        if file.pending is not None:
            self.end_delta(file)
            return
        model = file.model
        if self.counts["take_delta"] % 3 == 0:
            assert file.live.is_dirty == model.is_dirty
        model.pad()
        refs = model.delta_refs()
        delta = file.live.take_delta()
        assert (delta.size, delta.cut) == (model.size, model.cut)
        assert delta.refs.tolist() == refs
        named = {e for _, _, e, _ in refs if e}
        expected = [
            (x.id, x.media_offset, x.length, x.published // self.place.chunk)
            for x in (self.extents[e] for e in sorted(named))
            if x.length > x.published
        ]
        columns = ["id", "media_offset", "length", "first_chunk"]
        assert delta.extents[columns].tolist() == expected
        older = ModelMap(LIMIT)
        older.dirty, older.cut = model.dirty.copy(), model.cut
        older.taken_size, older.fresh = model.taken_size, model.fresh
        file.pending = Pending(delta, model.clone(), older)
        model.dirty[:] = False
        model.cut = model.taken_size = model.size
        model.fresh = False
        assert not file.live.is_dirty

    def end_delta(self, file: File) -> None:
        pending = file.pending
        assert pending is not None
        file.pending = None
        if self.rng.random() < 0.3:
            pending.delta.cancel(file.live)
            model, older = file.model, pending.older
            model.dirty |= older.dirty
            model.cut = min(model.cut, older.cut)
            model.taken_size = older.taken_size
            model.fresh |= older.fresh
            return
        delta = pending.delta
        # Records come in the order in which deltas were taken; here a shared extent may be known
        # to be longer already.
        news = [n > self.known.get(i, 0) for i, n in delta.extents[["id", "length"]].tolist()]
        self.replay.define(delta.extents[news], delta.crcs)
        self.known.update(delta.extents[news][["id", "length"]].tolist())
        file.replayed.replay(delta.cut, delta.refs.tobytes(), delta.size)
        delta.apply(file.live, file.committed)
        for extent_id, length in pending.extents.items():
            extent = self.extents[extent_id]
            extent.published = max(extent.published, length)
        file.committed_model.apply(delta.cut, delta.refs.tolist(), pending.snapshot)

    def clean(self, file: File) -> None:
        """Move a published range that the committed content refers to."""
        refs = file.committed_model.refs(0, file.committed_model.size)
        if not refs:
            return
        _, length, source, offset = self.rng.choice(refs)
        skip = self.rng.randrange(length)
        offset, length = offset + skip, self.rng.randint(1, length - skip)
        target = self.open_extent(length + self.rng.choice([0, 64, 300]))
        copy_extent(self.engine, source, offset, length, target)
        info, crcs = self.engine.describe(target)
        assert info["length"][0] == length
        self.replay.define_one(target, int(info["media_offset"][0]), length, 0, crcs.tobytes())
        self.known[target] = length
        self.engine.publish(target)
        extent = self.extents[target]
        extent.length = extent.published = length
        for other in self.files:
            for content in (other.live, other.committed, other.replayed):
                re_aim(content, (source, offset, length, target, 0))
        for content in self.copies:
            re_aim(content, (source, offset, length, target, 0))
        for other in self.files:
            for model in (other.model, other.committed_model):
                model.move(source, offset, length, target, 0)
        self.engine.close_lease(target)
        extent.open = False
        extent.capacity = extent.length

    def drop_some(self, _file: File) -> None:
        """Of what cut and closed contents referred to."""
        for _ in range(self.rng.randrange(8)):
            drop_discarded(self.engine, self.rng.randrange(4))

    def drop_all(self) -> None:
        while drop_discarded(self.engine, 1):
            pass
        assert self.engine.statistics().discarded_refs == 0

    def copy_in_parts(self, file: File) -> None:
        """A clone that is made a few references at a time, while the cleaner moves some."""
        copy = file.live.begin_copy()
        self.copies.append(copy)
        while file.live.copy_part(copy, self.rng.randint(1, 3)):
            if self.rng.random() < 0.7:
                self.clean(self.rng.choice([file, file, *self.files]))
            done = copy.export(0, LIMIT).tolist()
            assert done == file.model.refs(0, done[-1][0] + done[-1][1] if done else 0)
        self.clean(file)
        rows = file.model.refs(0, file.model.size)
        assert copy.export(0, LIMIT).tolist() == rows
        assert (copy.size, copy.ref_count, copy.is_dirty) == (file.model.size, len(rows), False)
        assert copy.allocated == file.model.allocated
        assert bytes(copy.read(0, LIMIT)) == file.model.data[: file.model.size].tobytes()
        self.copies.remove(copy)
        copy.close()

    def give_up_copy(self, file: File) -> None:
        copy = file.live.begin_copy()
        file.live.copy_part(copy, self.rng.randint(1, 5))
        copy.close()

    def drop_file(self, file: File) -> None:
        if file.pending is not None:
            self.end_delta(file)
        self.close_lease(file)
        for content in (file.live, file.committed, file.replayed):
            content.close()
        self.files.remove(file)
        self.new_file()

    def restart_replay(self, _file: File) -> None:
        """An image of the committed state, loaded by a new engine."""
        self.drop_all()
        maps = [f.committed for f in self.files]
        counts, refs, infos, crcs = self.engine.export_maps(maps)
        held = self.held()
        expected = {i: x.published for i, x in self.extents.items() if i in held and x.published}
        assert dict(infos[["id", "length"]].tolist()) == expected
        rows = [r for f in self.files for r in f.committed_model.refs(0, f.committed_model.size)]
        assert refs.tolist() == rows
        for file in self.files:
            file.replayed.close()
        self.replay.close()
        self.replay = self.place.another_engine()
        self.replay.define(infos, crcs)
        self.known = dict(infos[["id", "length"]].tolist())
        first = np.concatenate(([0], np.cumsum(counts))).astype(np.uint64)
        sizes = np.array([f.committed_model.size for f in self.files], dtype=np.uint64)
        owners = np.array([f.owner for f in self.files], dtype=np.uint64)
        for file, content in zip(
            self.files, import_maps(self.replay, owners, sizes, first, refs), strict=True
        ):
            file.replayed = content
            assert not content.is_dirty

    # --- checks -----------------------------------------------------------------------------

    def held(self) -> set[int]:
        """Extents that must be alive."""
        held = {i for i, x in self.extents.items() if x.open}
        for file in self.files:
            held.update(np.unique(file.model.extent).tolist())
            held.update(np.unique(file.committed_model.extent).tolist())
            if file.pending is not None:
                held.update(file.pending.delta.refs["extent_id"].tolist())
        return held - {0}

    def check_file(self, file: File) -> None:
        pairs = ((file.live, file.model), (file.committed, file.committed_model))
        for content, model in (*pairs, (file.replayed, file.committed_model)):
            assert content.size == model.size
            assert content.allocated == model.allocated
            rows = model.refs(0, model.size)
            assert content.export(0, 1 << 62).tolist() == rows
            assert content.ref_count == len(rows)
            assert bytes(content.read(0, LIMIT)) == model.data[: model.size].tobytes()
        assert file.live.is_dirty == file.model.is_dirty

    def check_engine(self) -> None:
        self.drop_all()
        held = self.held()
        assert set(self.engine.list()["id"].tolist()) == held
        for gone in set(self.extents) - held:
            del self.extents[gone]
        alive: collections.Counter[int] = collections.Counter()
        for extent in self.extents.values():
            alive[(extent.media_offset - FIRST) // SEGMENT] += 1
        dead = set(self.engine.dead_segments())
        assert not dead & set(alive)
        assert {s for s, n in self.alive_before.items() if n and not alive[s]} <= dead
        self.alive_before = alive
        free = set(range(SEGMENTS)) - set(alive) - {self.place.segment}
        self.place.free = sorted(free, key=lambda s: (s <= self.place.segment, s))
        statistics = self.engine.statistics()
        models = [m for f in self.files for m in (f.model, f.committed_model)]
        assert statistics.extents == len(self.extents)
        assert statistics.crcs == sum(
            -(-x.length // self.place.chunk) for x in self.extents.values()
        )
        assert statistics.refs == sum(len(m.refs(0, m.size)) for m in models)
        assert statistics.maps == len(models)
        self.check_usage(models)

    def check_usage(self, models: list[ModelMap]) -> None:
        used = np.zeros(SEGMENTS * SEGMENT, dtype=np.bool_)
        for model in models:
            for _, length, extent_id, offset in model.refs(0, model.size):
                start = self.extents[extent_id].media_offset - FIRST + offset
                used[start : start + length] = True
        for extent in self.extents.values():
            if extent.open:
                start = extent.media_offset - FIRST
                used[start : start + extent.capacity] = True
        expected = used.reshape(SEGMENTS, SEGMENT).sum(axis=1)
        assert self.engine.usage().tolist() == expected.tolist()

    def check_segment(self, segment: int) -> None:
        inside = {
            i: x for i, x in self.extents.items() if (x.media_offset - FIRST) // SEGMENT == segment
        }
        shares: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
        busy = any(x.open for x in inside.values())
        refs: list[tuple[int, Ref]] = [
            (content.owner, ref)
            for f in self.files
            for content, model in ((f.live, f.model), (f.committed, f.committed_model))
            for ref in model.refs(0, model.size)
            if ref[2] in inside
        ]
        for owner, (_, length, extent_id, offset) in refs:
            busy = busy or offset + length > inside[extent_id].published
            shares[extent_id, owner].update(range(offset, offset + length))
        found = alive(self.engine, segment)
        assert found.busy.tolist() == [busy]
        rows = found.ranges.tolist()
        assert [(r[3], r[4]) for r in rows] == sorted((r[3], r[4]) for r in rows)
        united: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
        for extent_id, offset, length, owner, file_offset, first, count, _ in rows:
            owners = found.owners[first : first + count].tolist()
            assert owner == min(owners)
            assert file_offset == min(
                start
                for who, (start, size, extent, at) in refs
                if who == owner
                and extent == extent_id
                and at < offset + length
                and offset < at + size
            )
            for who in owners:
                united[extent_id, who].update(range(offset, offset + length))
        assert {key: bytes_ - united.pop(key) for key, bytes_ in shares.items() if not busy} == {
            key: set() for key in shares if not busy
        }
        assert not united
