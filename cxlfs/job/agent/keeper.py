"""What the agents of a job's nodes agree on: steps that are whole on every node, each kept by all
of them as one checkpoint of the job's processes, with copies in other nodes' stores.

It is a ``Checkpointer`` of which the agents are the ranks: what counts, who has which copy, and
what may go is decided as there.

Never: what a step is, or how it got there (``orbax_files``).
"""

from __future__ import annotations

import dataclasses

from cxlfs.errors import CxlfsError, JobMessageError, NotRestoredError
from cxlfs.job.checkpointer import Checkpointer
from cxlfs.job.protocol import Asked, Attempt, Kind, decode, encode, judge
from cxlfs.job.protocol.messages import Stock


class Keeper(Checkpointer):
    """Of one agent, as long as the group is the same. ``question``: why nothing can be kept, or
    given to a job: what an operator has to decide first.
    """

    question: CxlfsError | None = None

    def meet(self) -> Attempt | None:
        """What all of them could load, the same on all; nothing is loaded. Afterwards checkpoints
        can be made, unless there is a ``question``.

        Raises UndecidedError, NotRestoredError (a store cannot be read), JobConfigurationError.
        """
        call = self._place().call
        heard = self._gather(call, "meet", encode(self._own_stock()))
        stocks = [_stock_of(body) for _, body in sorted(heard.items())]
        unread = [stock.reason for stock in stocks if stock.inventory is None]
        if unread:
            raise NotRestoredError("; ".join(unread))
        below = stocks[0].below
        self._met = tuple(s.inventory for s in stocks if s.inventory is not None)
        self._known = (*self._met, *([] if below is None else [below]))
        if stocks[0].below_reason and not any(each.commits for each in self._met):
            raise NotRestoredError(f"the tier below could not be read: {stocks[0].below_reason}")
        verdict = judge(self._met, can_fetch=True, below=below)
        self.question = None
        if verdict.kind in {Kind.REFUSE, Kind.OTHER_WORLD}:
            self.question = NotRestoredError("; ".join(verdict.reasons))
        elif verdict.kind is Kind.ASK:
            self.question = self._asked(Asked(verdict.heads, verdict.reasons, verdict.loadable))
        if self.question is not None:
            return None
        nonces = [stock.nonce for stock in stocks]
        line = self._begin_line(call, verdict, nonces, stocks[0].began)
        head = None if verdict.choice is None else verdict.choice.attempt
        self._began(verdict, line, head)
        return head

    def _asked(self, asked: Asked) -> CxlfsError:
        """The job is told: agents that come together again would be asked the same."""
        error = super()._asked(asked)
        return NotRestoredError(error.message, next_step=error.next_step)

    def _own_stock(self) -> Stock:
        nonce, began = self._nonce()
        try:
            own = Stock(self._take_stock(), nonce=nonce, began=began)
        except (CxlfsError, OSError) as error:
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
