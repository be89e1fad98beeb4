"""The link of an island: several equal devices, a process for each, that act as one worker.

Every rank of the process group runs the same loop over its own `IslandLink`. Rank 0 has the worker's real link behind
it, and nobody else has one:

    Version   rank 0 hands it on, and the parameters by broadcast                      `next_event`, `download`
    Lease     rank 0 hands it on whole; each rank computes its own units               `next_event`, `part_of`
    answer    sums of gradients, tokens and losses are added up at rank 0, which       `call`
              sends one Contribution for the whole lease
    Stop      rank 0 hands it on, and all ranks leave

Invariants: gradients are those of summed losses, so that unequal parts weigh by their tokens. An answer that is not
valid at one rank is not valid. Each lease is computed to its end, with one addition at every rank, so ranks never wait
in different collectives. When the link behind rank 0 breaks, the next event is the Stop that came before the break, or
else one that has the others start anew, each with a new `IslandLink`; rank 0 raises what broke it.

What travels besides tensors is encoded as on the wire (`wire.py`), never pickled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Contribution, Lease, Link, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.link.wire import Layout, decode, encode

T = TypeVar("T")


@dataclass(kw_only=True)
class IslandLink:
    """A rank's end. Used by one thread, but for `ask_to_stop`.

    `inner`: at rank 0. `parameters`: of a version. `place`: where tensors must be for the group to move them.
    `final_stop`: the Stop with which `inner` ended, where that was broken before the Stop was read. `asked_to_stop` is
    called at rank 0 when some rank was asked. What is said of another rank that has gone is torch's RuntimeError.
    """

    inner: Link | None
    parameters: Layout
    place: torch.device
    final_stop: Callable[[], Stop | None] = lambda: None
    asked_to_stop: Callable[[], None] = lambda: None
    _lease: Lease | None = field(default=None, init=False)
    _asked: bool = field(default=False, init=False)
    _behind: LinkError | None = field(default=None, init=False)
    """What broke the link behind."""

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            message = self._add_up(message)
        if self.inner is not None:
            self._from_behind(partial(self.inner.call, message))

    def next_event(self) -> ToWorker:
        event = None
        if self.inner is not None:
            event = self._from_behind(self.inner.next_event)
            if self._behind is not None and (event := self.final_stop()) is None:
                self.hand_on(Stop(reason=self._behind.message, again=True))
                raise self._behind
        event = self.hand_on(event)
        if not isinstance(event, Lease):
            return event
        self._lease = event
        return replace(event, units=part_of(event.units, rank=dist.get_rank(), num_ranks=dist.get_world_size()))

    def hand_on(self, event: ToWorker | None) -> ToWorker:
        """What rank 0 was told, which alone gives an event, to all ranks."""
        said = shared(encode(event) if event is not None else None)
        heard: ToWorker = event if event is not None else decode(said, Version, Lease, Stop)
        return heard

    def interrupted(self) -> bool:
        """A rank that left a lease off would only wait for the others."""
        return False

    def download(self, ref: TensorRef) -> Tensors:
        """The same tensors at every rank."""
        tensors = self._from_behind(partial(self.inner.download, ref)) if self.inner is not None else None
        if tensors is None:  # at another rank; or there are none, and nobody will want what is computed with them
            entries = self.parameters.entries
            tensors = {name: torch.empty(shape, dtype=dtype, device=self.place) for name, dtype, shape in entries}
        for name, *_ in self.parameters.entries:
            value = tensors[name].detach().to(self.place).contiguous()
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)  # as bytes: Gloo does not know each dtype
        return tensors

    def ask_to_stop(self) -> None:
        """Rank 0 hears of it when the lease at hand is done. Safe in a signal handler."""
        self._asked = True

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    def _from_behind(self, ask: Callable[[], T]) -> T | None:
        """At rank 0, what the link behind says; None once that is broken, until the next event."""
        if self._behind is None:
            try:
                return ask()
            except LinkError as error:
                self._behind = error
        return None

    def _add_up(self, answer: Contribution) -> Contribution:
        """The answer of all ranks, whole at rank 0 only."""
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
        """At rank 0; tensors of their own, as a contribution must stay as it is until the next version."""
        sums = {name: tensor.detach().to(self.place, copy=True).contiguous() for name, tensor in tensors.items()}
        for value in sums.values():
            dist.reduce(value, dst=0)
        return sums


def shared(text: bytes | None) -> bytes:
    """What rank 0 says, which alone gives it."""
    length = torch.tensor(len(text or b""))
    dist.broadcast(length, src=0)
    said = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(said, src=0)
    return said.numpy().tobytes()


def first_line(error: Exception) -> str:
    """torch adds where in its own code it was."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def part_of(units: Sequence[int], *, rank: int, num_ranks: int) -> tuple[int, ...]:
    """A rank's units of a lease: as many as any other has, or one more; none where there are fewer than ranks.

    The last ranks have more: rank 0 makes the updates, too.
    """
    return tuple(units[len(units) * rank // num_ranks : len(units) * (rank + 1) // num_ranks])
