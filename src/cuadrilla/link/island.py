"""The link of an island: several equal devices, with a process for each, that act as one worker.

Every rank of the process group runs the same loop with its own `IslandLink`. Only rank 0 has a link to the coordinator,
`inner`:

    Version   rank 0 broadcasts it and its parameters                                  `next_event`, `download`
    Lease     rank 0 broadcasts all of it; each rank computes its own units            `next_event`, `part_of`
    answer    sums of gradients, tokens and losses are reduced to rank 0, which        `call`
              sends one Contribution for the whole lease
    Stop      rank 0 broadcasts it, and all ranks leave

Invariants: gradients are those of summed losses, so unequal parts weigh by their tokens. An answer that is invalid at
one rank is invalid. Each lease is computed to its end, with one reduction at every rank, so ranks never wait in
different collectives. When `inner` breaks, its next event is a Stop that came before, or rank 0 raises the error. The
other ranks get a Stop then, too, that lets them start again with a new `IslandLink`.

Messages are encoded as on the wire (`wire.py`), never pickled.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Contribution, Lease, Link, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.link.wire import Layout, decode, encode


@dataclass(kw_only=True)
class IslandLink:
    """The link of one rank. Used by one thread, except `ask_to_stop`. If another rank is gone, torch raises
    RuntimeError.

    `inner`: None but at rank 0. `parameters`: the layout of a version. `device`: that of tensors in collectives.
    `asked_to_stop` is called when any rank was asked to stop.
    """

    inner: Link | None
    parameters: Layout
    device: torch.device
    asked_to_stop: Callable[[], None] = lambda: None
    _lease: Lease | None = field(default=None, init=False)
    _asked: bool = field(default=False, init=False)

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            message = self._add_up(message)
        if self.inner is not None:
            with suppress(LinkError):  # `next_event` tells all ranks
                self.inner.call(message)

    def next_event(self) -> ToWorker:
        event = None
        if self.inner is not None:
            try:
                event = self.inner.next_event()
            except LinkError as error:
                self.broadcast(Stop(reason=error.message, again=True))
                raise
        event = self.broadcast(event)
        if not isinstance(event, Lease):
            return event
        self._lease = event
        return replace(event, units=part_of(event.units, rank=dist.get_rank(), num_ranks=dist.get_world_size()))

    def broadcast(self, event: ToWorker | None) -> ToWorker:
        """Broadcast an event. Rank 0 passes it in, the others pass None; all get it."""
        said = broadcast_bytes(encode(event) if event is not None else None)
        heard: ToWorker = event if event is not None else decode(said, Version, Lease, Stop)
        return heard

    def interrupted(self) -> bool:
        """Always False: a rank that gave up a lease would only wait for the others."""
        return False

    def download(self, ref: TensorRef) -> Tensors:
        """The tensors of a version, the same at every rank."""
        tensors: Tensors | None = None
        if self.inner is not None:
            with suppress(LinkError):  # the lease will be dropped then
                tensors = self.inner.download(ref)
        if tensors is None:
            entries = self.parameters.entries
            tensors = {name: torch.empty(shape, dtype=dtype, device=self.device) for name, dtype, shape in entries}
        for name, *_ in self.parameters.entries:
            value = tensors[name].detach().to(self.device).contiguous()
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)  # as bytes: Gloo lacks some dtypes
        return tensors

    def ask_to_stop(self) -> None:
        """Rank 0 learns of it at the end of the present lease. Safe in a signal handler."""
        self._asked = True

    def _add_up(self, answer: Contribution) -> Contribution:
        """The answer of all ranks together. Only at rank 0 are its tensors complete."""
        assert self._lease is not None, "an answer to no lease"
        tokens, loss = (answer.tokens, answer.loss_sum) if answer.valid else (0, 0.0)
        counts = torch.tensor([not answer.valid, self._asked, tokens, loss], dtype=torch.float64)
        dist.all_reduce(counts)
        num_invalid, num_asked, tokens, loss_sum = counts.tolist()
        if num_asked:
            self.asked_to_stop()
        return replace(
            answer,
            lease_id=self._lease.lease_id,
            tokens=int(tokens),
            loss_sum=loss_sum,
            tensors=answer.tensors if num_invalid else self._sums(answer.tensors),
            valid=not num_invalid,
        )

    def _sums(self, tensors: Tensors) -> Tensors:
        """The sums over all ranks, at rank 0. They are new tensors: a contribution must not change until the next
        version."""
        sums = {name: tensor.detach().to(self.device, copy=True).contiguous() for name, tensor in tensors.items()}
        for value in sums.values():
            dist.reduce(value, dst=0)
        return sums


def broadcast_bytes(text: bytes | None, *, src: int = 0) -> bytes:
    """Broadcast bytes from one rank. The other ranks pass None."""
    length = torch.tensor(len(text or b""))
    dist.broadcast(length, src=src)
    said = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(said, src=src)
    return said.numpy().tobytes()


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, of which each passes in its own. JSON."""
    text = json.dumps(value).encode()
    return [
        json.loads(broadcast_bytes(text if rank == dist.get_rank() else None, src=rank))
        for rank in range(dist.get_world_size())
    ]


def part_of(units: Sequence[int], *, rank: int, num_ranks: int) -> tuple[int, ...]:
    """A rank's units of a lease. Numbers differ by at most one; with fewer units than ranks some have none.

    The last ranks have more, because rank 0 also runs the optimizer if the island coordinates.
    """
    return tuple(units[len(units) * rank // num_ranks : len(units) * (rank + 1) // num_ranks])
