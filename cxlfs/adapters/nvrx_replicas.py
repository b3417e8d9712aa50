"""What NVRx calls a replication strategy: the state dicts of other ranks, for its own
LocalCheckpointManager to save beside this rank's, and the way back to who has lost its own.

    root = "/mnt/ckpt/run1"
    manager = LocalCheckpointManager(root, repl_strategy=ReplicationStrategy(root, replicas=2))

Where copies belong and how bytes travel is as for the Checkpointer (``protocol.placement``,
``engines``): into stores of other failure domains, over links of their own. It needs no GPU.

Never: collectives; what is in a state dict, or when it is saved (NVRx).

Invariants
- Every wait ends by the deadline. What fails on one rank is raised on all, and none saves then:
  what NVRx finds afterwards has all of its copies.
- Bytes are summed (CRC32C) as they leave and compared as they arrive, before they are given to
  anybody.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import itertools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from cxlfs.adapters import require
from cxlfs.errors import (
    InvariantError,
    JobLinkError,
    JobMessageError,
    NotRestoredError,
    UndecidedError,
)
from cxlfs.job import medium
from cxlfs.job.checkpointer import DEADLINE_SECONDS_DEFAULT, domain_of
from cxlfs.job.driver import reason_of
from cxlfs.job.engines import Engine, Link, Pending, engine_named, gather
from cxlfs.job.exchange import exchange
from cxlfs.job.pieces import PIECE_BYTES, PIECES_IN_FLIGHT
from cxlfs.job.protocol import Inventory, Placement, Transfer, place_copies
from cxlfs.native import crc32c
from cxlfs.plain import Plain, PlainError, fields, number, parse, row, text

if TYPE_CHECKING:
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
    from torch import Tensor

Id: TypeAlias = tuple[int, int, str]
"""Of a checkpoint, as NVRx has it: iteration, rank, session."""
_FRAME_BYTES = 4096
_HEAD_BYTES_MAX = 256 << 20
_MESSAGE_BYTES_MAX = 1 << 20
_IDS_MAX = 1 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """``entries[i]``: a checkpoint, who sends it, who receives it; the same on all ranks."""

    rank: int
    entries: tuple[tuple[Id, int, int], ...]

    def required_ids(self, rank: int | None = None) -> set[Id]:
        """What that rank (None: this one) has to load and send, to itself perhaps."""
        whose = self.rank if rank is None else rank
        return {wanted for wanted, sender, _ in self.entries if sender == whose}


class Replicas:
    """``root``: the directory that the LocalCheckpointManager of this node has. ``replicas``: in so
    many stores, each of another failure domain, lies what each rank saves; ``domain``: with what
    else this node fails (CXLFS_DOMAIN, or its name). Made, and called, on all ranks alike; ranks
    meet at the first call.

    All methods raise UndecidedError, JobConfigurationError, JobLinkError, OSError.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        replicas: int = 2,
        domain: str | None = None,
        engine: str | Engine = "auto",
        deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
    ) -> None:
        self._root = Path(root)
        self._replicas = replicas
        self._domain = domain_of(domain)
        self._made = engine
        self._engine: Engine | None = None
        self._placement: Placement | None = None
        self._seconds = deadline_seconds
        self._calls = itertools.count()

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Id
    ) -> tuple[list[TensorAwareStateDict], list[Id]]:
        """This rank's own, and those that belong into its store beside it."""
        engine, placement = self._met()
        name, packed = self._name("copies"), Packed.of(local_ckpt, id_)
        came: dict[int, tuple[TensorAwareStateDict, Id]] = {}

        def receive(link: Link, transfer: Transfer) -> None:
            came[transfer.shard] = _receive(link)

        failures = exchange(
            *(engine, placement.transfers(), name, self._seconds),
            lambda link, _: _send(link, packed),
            receive,
        )
        self._agree(name, failures.values())
        states = [local_ckpt, *(state for _, (state, _) in sorted(came.items()))]
        return states, [id_, *(its for _, (_, its) in sorted(came.items()))]

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[Id]], wanted: Sequence[Id]
    ) -> Plan:
        """Raises NotRestoredError too, alike on all ranks."""
        engine, _ = self._met()
        body = json.dumps([list(each) for each in wanted]).encode()
        entries = []
        for receiver, told in sorted(self._gather(self._name("wanted"), body).items()):
            for each in _ids_of(told):
                having = [
                    rank
                    for rank in range(engine.world().size)
                    if each in {tuple(known) for known in globally_available_ids[rank]}
                ]
                if not having:
                    raise NotRestoredError(f"no rank has {each}, which rank {receiver} needs")
                sender = receiver if receiver in having else having[receiver % len(having)]
                entries.append((each, sender, receiver))
        return Plan(engine.world().rank, tuple(entries))

    def retrieve_execute(
        self, plan: Plan, my_data: Mapping[Id, TensorAwareStateDict]
    ) -> dict[Id, TensorAwareStateDict]:
        """What this rank wanted. ``my_data``: what the plan requires of it."""
        engine, _ = self._met()
        name, own = self._name("back"), engine.world().rank
        found = {each: my_data[each] for each, sender, to in plan.entries if sender == to == own}
        transfers = [
            Transfer(index, sender, receiver)
            for index, (_, sender, receiver) in enumerate(plan.entries)
            if sender != receiver
        ]

        def send(link: Link, transfer: Transfer) -> None:
            each = plan.entries[transfer.shard][0]
            _send(link, Packed.of(my_data[each], each))

        def receive(link: Link, transfer: Transfer) -> None:
            state, its = _receive(link)
            if its != plan.entries[transfer.shard][0]:
                raise JobMessageError(f"{its} came, and not {plan.entries[transfer.shard][0]}")
            state.restore_tensor_device(non_blocking=False)
            found[its] = state

        failures = exchange(engine, transfers, name, self._seconds, send, receive)
        self._agree(name, failures.values())
        return found

    # --- all ranks --------------------------------------------------------------------------

    def _met(self) -> tuple[Engine, Placement]:
        """The group, once it has come together."""
        if self._engine is None:
            made = self._made
            self._engine = engine_named(made) if isinstance(made, str) else made
        if self._placement is None:
            self._root.mkdir(parents=True, exist_ok=True)
            own = json.dumps({"store": medium.identity(self._root), "domain": self._domain})
            told = self._gather("nvrx/stores", own.encode())
            inventories = [_inventory_of(body) for _, body in sorted(told.items())]
            self._placement = place_copies(inventories, self._replicas)
        return self._engine, self._placement

    def _name(self, phase: str) -> str:
        """The same on all ranks, and no other time."""
        return f"nvrx/{next(self._calls)}/{phase}"

    def _gather(self, key: str, body: bytes) -> dict[int, bytes]:
        if self._engine is None:
            raise InvariantError("no engine yet")
        heard = gather(self._engine, key, body, self._seconds)
        missing = sorted(set(range(self._engine.world().size)) - set(heard))
        if missing:
            ranks = ", ".join(map(str, missing))
            raise UndecidedError(f"{key}: not heard within {self._seconds:g} s: rank {ranks}")
        return heard

    def _agree(self, name: str, failures: Collection[Exception]) -> None:
        """All have what they should, or all raise."""
        own = "; ".join(map(reason_of, failures))
        told = self._gather(f"{name}/done", own.encode())
        failed = {rank: body.decode(errors="replace") for rank, body in told.items() if body}
        if failed:
            each = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(failed.items()))
            raise JobLinkError(f"not copied: {each}")


def _ids_of(body: bytes) -> tuple[Id, ...]:
    try:
        return row(parse(body, _MESSAGE_BYTES_MAX), _id_of, _IDS_MAX)
    except PlainError as error:
        raise JobMessageError(f"which checkpoints a rank wants: {error}") from None


def _id_of(plain: Plain) -> Id:
    if not isinstance(plain, list) or len(plain) != 3:
        raise PlainError("not iteration, rank and session")
    return number(plain[0]), number(plain[1]), text(plain[2])


def _inventory_of(body: bytes) -> Inventory:
    try:
        found = fields(parse(body, _MESSAGE_BYTES_MAX), ("store", "domain"))
        return Inventory(text(found["store"]), domain=text(found["domain"]))
    except PlainError as error:
        raise JobMessageError(f"which store a rank has: {error}") from None


# --- one state dict, as it travels --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """``head``: a pickle of the checkpoint's id, the state dict without its tensors, and what these
    are (NVRx pickles them, too); ``views``: their bytes.
    """

    head: bytes
    views: tuple[memoryview, ...]

    @classmethod
    def of(cls, state: TensorAwareStateDict, id_: Id) -> Packed:
        """It has its tensors again when this returns."""
        import torch  # noqa: PLC0415 - the framework, when it is used

        tensors = list(state.pop_tensors())
        try:
            kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
            head = io.BytesIO()
            torch.save((id_, state, kinds), head)
        finally:
            state.insert_tensors(tensors)
        return cls(head.getvalue(), tuple(map(_bytes_of, tensors)))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Of it, or of a copy on the host."""
    import torch  # noqa: PLC0415 - as above

    flat = tensor.detach().to("cpu").contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _send(link: Link, packed: Packed) -> None:
    """On return the other rank has it. Raises JobLinkError, JobMessageError."""
    _tell(link, {"head_bytes": len(packed.head), "crc32c": crc32c(packed.head)})
    found = 0
    with _Flight() as flight:
        for view in (memoryview(bytearray(packed.head)), *packed.views):
            for piece in _pieces(view):
                found = crc32c(piece, found)
                flight.begin(link.send(piece))
    _tell(link, {"crc32c": found})
    reason = text(_hear(link, ("reason",))["reason"])
    if reason:
        raise JobLinkError(f"refused: {reason}")


def _receive(link: Link) -> tuple[TensorAwareStateDict, Id]:
    """Raises JobLinkError, JobMessageError."""
    try:
        made = _taken(link)
    except JobMessageError as error:
        _tell(link, {"reason": error.message})
        raise
    _tell(link, {"reason": ""})
    return made


def _taken(link: Link) -> tuple[TensorAwareStateDict, Id]:
    import torch  # noqa: PLC0415 - as above

    told = _hear(link, ("head_bytes", "crc32c"))
    size = number(told["head_bytes"])
    if size > _HEAD_BYTES_MAX:
        raise JobMessageError(f"a head of {size} bytes")
    head = bytearray(size)
    found = _fill(link, memoryview(head), 0)
    if found != told["crc32c"]:
        raise JobMessageError("its head is damaged on arrival")
    id_, state, kinds = torch.load(io.BytesIO(head), weights_only=False)
    tensors = [torch.empty(shape, dtype=kind) for kind, shape in kinds]
    for tensor in tensors:
        found = _fill(link, _bytes_of(tensor), found)
    if found != _hear(link, ("crc32c",))["crc32c"]:
        raise JobMessageError(f"{id_} is damaged on arrival")
    state.insert_tensors(tensors)
    return state, id_


def _fill(link: Link, view: memoryview, found: int) -> int:
    """The checksum of all that came so far."""
    for piece in _pieces(view):
        link.receive(piece).wait()
        found = crc32c(piece, found)
    return found


def _pieces(view: memoryview) -> list[memoryview]:
    return [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]


class _Flight:
    """Pieces on their way, a few at once."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Pending] = collections.deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        while self._waiting and kind is None:
            self._waiting.popleft().wait()

    def begin(self, pending: Pending) -> None:
        self._waiting.append(pending)
        if len(self._waiting) > PIECES_IN_FLIGHT:
            self._waiting.popleft().wait()


def _tell(link: Link, plain: Mapping[str, object]) -> None:
    link.send(bytearray(json.dumps(plain).encode()[:_FRAME_BYTES].ljust(_FRAME_BYTES))).wait()


def _hear(link: Link, names: tuple[str, ...]) -> dict[str, Plain]:
    frame = bytearray(_FRAME_BYTES)
    link.receive(frame).wait()
    try:
        return fields(parse(bytes(frame), _FRAME_BYTES), names)
    except PlainError as error:
        raise JobMessageError(f"not a frame: {error}") from None


# --- as a class of NVRx's -----------------------------------------------------------------------


def __getattr__(name: str) -> object:
    """``ReplicationStrategy``: made when it is asked for."""
    if name == "ReplicationStrategy":
        return _class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _class() -> Callable[..., Replicas]:
    require("nvidia_resiliency_ext.checkpointing.local.replication.strategies", "nvrx")
    from nvidia_resiliency_ext.checkpointing.local.replication import strategies  # noqa: PLC0415

    class ReplicationStrategy(Replicas, strategies.ReplicationStrategy):  # type: ignore[misc]
        """See the module."""

    return ReplicationStrategy
