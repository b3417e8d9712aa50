"""What the agents of a job's nodes agree on: steps that are whole on every node, each kept by all
of them as one checkpoint of the job's processes, with copies in other nodes' stores.

It is a ``Checkpointer`` of which the agents are the ranks: what counts, who has which copy, and
what may go is decided as there.

Never: what a step is, or how it got there (``orbax_files``).
"""

from __future__ import annotations

import dataclasses

from cxlfs.errors import CxlfsError, JobFilesError, JobMessageError, NotRestoredError
from cxlfs.job import files
from cxlfs.job.checkpointer import Checkpointer
from cxlfs.job.protocol import Attempt, choose, decode, encode, next_number
from cxlfs.job.protocol.messages import Stock


class Keeper(Checkpointer):
    """Of one agent, as long as the group is the same."""

    def meet(self) -> Attempt | None:
        """The newest that all of them could load, the same on all; nothing is loaded. Afterwards
        checkpoints can be made.

        Raises UndecidedError, NotRestoredError (a store cannot be read), JobConfigurationError.
        """
        heard = self._gather(self._place().call, "meet", encode(self._own_stock()))
        stocks = [_stock_of(body) for _, body in sorted(heard.items())]
        unread = [stock.reason for stock in stocks if stock.inventory is None]
        if unread:
            raise NotRestoredError("; ".join(unread))
        below = stocks[0].below
        self._met = tuple(s.inventory for s in stocks if s.inventory is not None)
        self._known = (*self._met, *([] if below is None else [below]))
        if stocks[0].below_reason and not any(each.commits for each in self._met):
            raise NotRestoredError(f"the tier below could not be read: {stocks[0].below_reason}")
        self.copies.settle(self._met)
        self._room.settle(self._met, self.store)
        self._next_number = next_number(self._known)
        choice, _ = choose(self._met, can_fetch=True, below=below)
        return None if choice is None else choice.attempt

    def _own_stock(self) -> Stock:
        try:
            own = Stock(files.logged_inventory(self.root, self.store, self.domain))
        except (JobFilesError, OSError) as error:
            return Stock(None, f"rank {self.world.rank}: {error}")
        if self._tier is None or self.world.rank:
            return own
        try:
            return dataclasses.replace(own, below=self._tier.stock())
        except CxlfsError as error:
            return dataclasses.replace(own, below_reason=error.message)


def _stock_of(data: bytes) -> Stock:
    body = decode(data)
    if not isinstance(body, Stock):
        raise JobMessageError("a message in the place of an inventory")
    return body
