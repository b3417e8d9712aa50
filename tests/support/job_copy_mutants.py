"""Mistakes of programs that keep copies in other nodes' stores, planted one at a time: each makes a
test of ``tests/job/test_copies.py``, ``test_copying.py`` or ``test_resharding.py``, or of
``tests/mounted/test_job_copies.py``, fail.
"""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from cxlfs.job import Reachable, copies, copying, files, incoming, outgoing, resharding
from cxlfs.job.copies import Copies
from cxlfs.job.offers import Choice, Head, choose
from cxlfs.job.protocol import Inventory, Placement, missing_copies, place_copies, planning
from cxlfs.job.resharding import Resharding
from tests.support.job_ranks import Job

Patch = pytest.MonkeyPatch

_seal = files.seal


def assert_found(
    mistake: Callable[[Patch], None], test: Callable[..., None], job: Job, patch: Patch
) -> None:
    """The test fails with it."""
    mistake(patch)
    patches = "monkeypatch" in inspect.signature(test).parameters
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(job, **{"monkeypatch": patch} if patches else {})


def what_comes_in_is_not_compared(patch: Patch) -> None:
    """Replica bytes wrong, and no check."""
    patch.setattr(incoming.Incoming, "judge", lambda _self: None)


def what_was_written_is_not_read_back(patch: Patch) -> None:
    patch.setattr(incoming, "_compare_by_reading", lambda *_: None)


def it_is_reported_before_it_is_there(patch: Patch) -> None:
    """A copy counts as made when its last byte has left."""
    heard: dict[int, int] = {}
    hear = copying._hear_consent

    def once(link: Any, *_blame: Any) -> None:
        heard[id(link)] = heard.get(id(link), 0) + 1
        if heard[id(link)] == 1:
            hear(link)

    patch.setattr(copying, "_hear_consent", once)


def the_last_of_a_file_alone_is_read_back(patch: Patch) -> None:
    compare = incoming._compare_by_reading

    def at_the_end(path: Path, shard: files.Shard, begin: int, end: int, *sums: int) -> None:
        if end == shard.size_bytes:
            compare(path, shard, begin, end, *sums)

    patch.setattr(incoming, "_compare_by_reading", at_the_end)


def pages_are_not_compared(patch: Patch) -> None:
    """Of what was stored directly the sums alone are looked at."""
    patch.setattr(incoming, "_comparison", lambda *_: lambda: None)


def sums_are_not_those_of_the_manifest(patch: Patch) -> None:
    """What was stored directly is what it was summed as; not that it is what was sent."""
    patch.setattr(incoming, "_is_summed_as", lambda *_: True)


def nobody_looks_whose_fault_it_was(patch: Patch) -> None:
    patch.setattr(outgoing.Outgoing, "blame", lambda _self: None)


def room_is_not_reserved(patch: Patch) -> None:
    def make(manifest: files.Manifest, root: Path) -> files.Manifest:
        staged = files.begin_anew(root, manifest.attempt, manifest.rank)
        for shard in manifest.shards:
            (staged / shard.name).parent.mkdir(exist_ok=True)
            (staged / shard.name).touch()
        return manifest

    patch.setattr(copying, "_reserve", make)


def domains_are_not_looked_at(patch: Patch) -> None:
    def anywhere(inventories: Sequence[Inventory], replicas: int) -> Placement:
        return place_copies([dataclasses.replace(i, domain=i.store) for i in inventories], replicas)

    patch.setattr(copies, "place_copies", anywhere)


def the_next_rank_keeps_it(patch: Patch) -> None:
    """Whosever store that rank has."""

    def ring(inventories: Sequence[Inventory], _replicas: int) -> Placement:
        count = len(inventories)
        return Placement(tuple(((rank + 1) % count,) for rank in range(count)))

    patch.setattr(copies, "place_copies", ring)


def a_new_node_is_not_filled(patch: Patch) -> None:
    """Redundancy unused on a replaced node: the next loss is final."""
    patch.setattr(Copies, "fill", lambda *_: None)


def a_copy_that_failed_counts_as_there(patch: Patch) -> None:
    def missing(placement: Any, choice: Any, inventories: Any, _excluded: Any) -> Any:
        return missing_copies(placement, choice, inventories, ())

    patch.setattr(copies, "missing_copies", missing)


def copies_are_never_given_back(patch: Patch) -> None:
    patch.setattr(Copies, "has_all", False)
    patch.setattr(Copies, "is_mine", lambda self, rank: rank == self.rank)


def an_abort_leaves_copies_behind(patch: Patch) -> None:
    def own(self: Copies, attempt: Any) -> None:
        files.remove_rank(self.root, attempt, self.rank)

    patch.setattr(Copies, "discard", own)


def what_is_damaged_stays_in_its_place(patch: Patch) -> None:
    def keep(root: Path, manifest: files.Manifest) -> str:
        staged = files.staging_path(root, manifest.attempt, manifest.rank)
        if files.rank_path(root, manifest.attempt, manifest.rank).exists():
            shutil.rmtree(staged)
            return files.digest_of_bytes(manifest.encode())
        return _seal(root, manifest)

    patch.setattr(files, "seal", keep)


def another_generation_is_taken_for_it(patch: Patch) -> None:
    """What came is believed to be what was asked for."""
    decode = files.decode_manifest

    def believe(link: Any, _wanted: copying.Wanted) -> files.Manifest:
        size, _ = copying._hear(link)
        data = bytearray(size)
        link.receive(data).wait()
        return decode(bytes(data), Path())

    patch.setattr(copying, "_hear_manifest", believe)


def a_manifest_that_reads_as_one_is_believed(patch: Patch) -> None:
    """Its checksum is not compared."""
    patch.setattr(files, "crc32c", lambda _data: 0)


def of_manifests_that_differ_none_is_taken(patch: Patch) -> None:
    """Whatever was recorded of the votes."""
    decide = planning.voted_for

    def give_up(told: Sequence[Collection[str]], known: Collection[str]) -> tuple[str, ...]:
        if any(len(each) > 1 for each in told):
            raise planning.Refusal("stores differ")
        return decide(told, known)

    patch.setattr(planning, "voted_for", give_up)


def a_copy_by_its_name_is_taken_for_one(patch: Patch) -> None:
    """That it is of another manifest is not looked at: it is never made again."""

    def missing(placement: Any, choice: Any, inventories: Any, excluded: Any) -> Any:
        held = {(h.rank, i.store) for i in inventories for h in i.held}
        found = missing_copies(placement, choice, inventories, excluded)
        return [t for t in found if (t.shard, inventories[t.target].store) not in held]

    patch.setattr(copies, "missing_copies", missing)


# --- in another number of ranks -----------------------------------------------------------------


def what_was_brought_stays(patch: Patch) -> None:
    """Each restart takes the room of another checkpoint."""
    patch.setattr(resharding, "shutil", types.SimpleNamespace(rmtree=lambda *_, **__: None))


def heads_are_believed(patch: Patch) -> None:
    def put(self: Resharding, choice: Choice, rank: int, head: Head) -> None:
        directory = files.rank_path(self._brought_root, choice.attempt, rank)
        for name, data in head.files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)

    patch.setattr(Resharding, "_put", put)


def a_holder_that_failed_is_asked_again(patch: Patch) -> None:
    patch.setattr(resharding, "choose", lambda offers, left_out, _bad: choose(offers, left_out))


def all_that_there_is_is_sent(patch: Patch) -> None:
    look = Resharding._look

    def greedy(self: Resharding, choice: Choice, *rest: Any) -> Any:
        return look(self, choice, *rest)[0], frozenset(choice.manifests)

    patch.setattr(Resharding, "_look", greedy)


def parts_are_read_as_they_lie(patch: Patch) -> None:
    """What this rank reaches itself is not compared before it is loaded."""

    def directory(self: Reachable, rank: int) -> Path:
        return self.directory(next(part for part in self.parts if part.rank == rank))

    patch.setattr(Reachable, "verified", directory)
