"""Planted bugs in files that are filled through mappings: publishing them early, pages lost."""

from __future__ import annotations

from cxlfs.store.files import Files
from cxlfs.store.namespace import Inode
from cxlfs.store.shared_maps import SharedMaps
from tests.support.mutants import Patch, during, mutant, nothing


@mutant("one/LINE/mapped_filled", 7, 16)
def mapped_holes_published_at_close(patch: Patch) -> None:
    """A close publishes what a program is about to fill through its mapping."""
    patch.setattr(SharedMaps, "defers", lambda *_: False)


@mutant("one/LINE/mapped_lost", 7, 16)
def lost_pages_published(patch: Patch) -> None:
    """That a page could not be stored is known to the kernel alone."""
    patch.setattr(SharedMaps, "lose", nothing)


@mutant("one/LINE/mapped_lost_of_a_new_file", 16)
def lost_pages_read_as_zeros(patch: Patch) -> None:
    """A new file keeps its size, with holes for what it has lost."""
    during(patch, Files, "settle_lost", (Files, "_cut", nothing))


@mutant("one/LINE/mapped_lost_of_a_new_file", 7)
def lost_pages_replace_a_whole_file(patch: Patch) -> None:
    """A file that has lost pages is renamed over another one."""
    original = Files.settle_lost

    def settle_lost(self: Files, inode: Inode) -> bool:
        settled = original(self, inode)
        self.versions.shared_maps.forget(inode)
        return settled

    patch.setattr(Files, "settle_lost", settle_lost)


@mutant("one/LINE/mapped_periodically", 7)
def mapped_file_never_finished(patch: Patch) -> None:
    """What is mapped waits for its last close, however long nothing of it has been missing."""
    patch.setattr(SharedMaps, "is_finished", lambda *_: False)


@mutant("one/LINE/mapped_again_and_lost", 7, 16)
def held_version_given_up_for_a_mapped_one(patch: Patch) -> None:
    """What would come back gives its space to what may never be whole."""
    patch.setattr(SharedMaps, "is_unfinished", lambda *_: False)
