"""The link of an island: several equal devices, a process for each, that act as one worker.

Every rank of the process group runs the same loop over its own `IslandLink`. Rank 0 has the worker's real link behind
it, and nobody else has one:

    Version   rank 0 hands it on, and the parameters by broadcast                      `next_event`, `download`
    Lease     rank 0 hands it on whole; each rank computes its own units               `next_event`, `part_of`
    answer    sums of gradients, tokens and losses are added up at rank 0, which       `call`
              sends one Contribution for the whole lease
    Stop      rank 0 hands it on, and all ranks leave

Invariants: gradients are those of summed losses, so that unequal parts weigh by their tokens. An answer that is not
valid at one rank is not valid. Every lease ends at every rank with exactly one addition, whether the rank has an answer
or has left off, so ranks never wait in different collectives; nobody computes between the collectives of one addition.
That nobody wants a lease any more is decided by rank 0 alone, which leaves word in the group's store: the others look
there, and where they have not looked in time their answer is dropped in the addition.
When the link behind rank 0 breaks, nobody wants the lease at hand. The next event is the Stop that came before the
break, or else one that has the others start anew, each with a new `IslandLink`; rank 0 raises what broke it.

What travels besides tensors is encoded as on the wire (`wire.py`), never pickled.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # exported without saying so

from cuadrilla.errors import LinkError
from cuadrilla.link.base import Contribution, Lease, Link, Stop, TensorRef, Tensors, ToCoordinator, ToWorker, Version
from cuadrilla.link.wire import Layout, decode, encode

T = TypeVar("T")
LOOK_SECONDS = 0.2
"""Between two looks at the store: each is a message to another process."""


class IslandBroken(LinkError):
    """Another rank is gone, or has failed: this one cannot go on without it."""


@dataclass(kw_only=True)
class IslandLink:
    """A rank's end. Used by one thread, but for `ask_to_stop`.

    `inner`: at rank 0. `parameters`: of a version. `place`: where tensors must be for the group to move them.
    `farewell`: the Stop with which `inner` ended, where that was broken before the Stop was read. `asked_to_stop` is
    called at rank 0 when some rank was asked. `why_broken`: what a rank that failed has said.
    """

    inner: Link | None
    parameters: Layout
    place: torch.device
    store: Store
    farewell: Callable[[], Stop | None] = lambda: None
    asked_to_stop: Callable[[], None] = lambda: None
    why_broken: Callable[[], str] = lambda: ""
    _lease: Lease | None = field(default=None, init=False)
    _unwanted: bool = field(default=False, init=False)
    _looked_at: float = field(default=0.0, init=False)
    _asked: bool = field(default=False, init=False)
    _behind: LinkError | None = field(default=None, init=False)

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Contribution):
            whole = self._add_up(message)
            if whole is None:
                return
            message = whole
        if self.inner is not None:
            self._from_behind(partial(self.inner.call, message), None)

    def next_event(self) -> ToWorker:
        if self._lease is not None:  # it was left off
            self._add_up(None)
        event = None
        if self.inner is not None:
            event = self._from_behind(self.inner.next_event, None)
            if self._behind is not None and (event := self.farewell()) is None:
                self.hand_on(Stop(reason=self._behind.message, again=True))
                raise self._behind
        event = self.hand_on(event)
        if not isinstance(event, Lease):
            return event
        self._lease, self._unwanted, self._looked_at = event, False, time.monotonic()
        return replace(event, units=part_of(event.units, rank=dist.get_rank(), num_ranks=dist.get_world_size()))

    def hand_on(self, event: ToWorker | None) -> ToWorker:
        """What rank 0 was told, which alone gives an event, to all ranks."""
        with self._together():
            said = shared(encode(event) if event is not None else None)
        heard: ToWorker = event if event is not None else decode(said, Version, Lease, Stop)
        return heard

    def interrupted(self) -> bool:
        """At other ranks than 0 a moment later."""
        if self._unwanted or self._lease is None:
            return self._unwanted
        name = f"unwanted/{self._lease.lease_id}"
        if self.inner is not None:
            self._unwanted = self._from_behind(self.inner.interrupted, True)
            if self._unwanted:
                with self._together():
                    self.store.set(name, "yes")
        elif time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._looked_at = time.monotonic()
            with self._together():
                self._unwanted = self.store.check([name])
        return self._unwanted

    def download(self, ref: TensorRef) -> Tensors:
        """The same tensors at every rank."""
        tensors = self._from_behind(partial(self.inner.download, ref), None) if self.inner is not None else None
        if tensors is None:  # at another rank; or there are none, and nobody will want what is computed with them
            values = torch.empty(sum(self.parameters.sizes), dtype=torch.uint8, device=self.place)
        else:
            values = joined(tensors, self.parameters, self.place)
        with self._together():
            dist.broadcast(values, src=0)
        return tensors if tensors is not None else self.parameters.views(values)

    def ask_to_stop(self) -> None:
        """Rank 0 hears of it when the lease at hand is done. Safe in a signal handler."""
        self._asked = True

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    def _from_behind(self, ask: Callable[[], T], otherwise: T) -> T:
        """At rank 0, what the link behind says; `otherwise` once that is broken, until the next event."""
        if self._behind is None:
            try:
                return ask()
            except IslandBroken:
                raise
            except LinkError as error:
                self._behind = error
        return otherwise

    def _add_up(self, answer: Contribution | None) -> Contribution | None:
        """The answer of all ranks, whole at rank 0 only; None unless all of them have one."""
        assert self._lease is not None, "an answer to no lease"
        lease, self._lease = self._lease, None
        valid = answer is not None and answer.valid
        tokens, loss = (answer.tokens, answer.loss_sum) if answer is not None and valid else (0, 0.0)
        counts = torch.tensor([answer is None, not valid, self._asked, tokens, loss], dtype=torch.float64)
        with self._together():
            dist.all_reduce(counts)
        num_without, num_invalid, num_asked, tokens, loss_sum = counts.tolist()
        if num_asked:
            self.asked_to_stop()
        if answer is None or num_without:
            return None
        tensors = answer.tensors if num_invalid else self._sums(answer.tensors)
        return replace(
            answer,
            lease_id=lease.lease_id,
            tokens=int(tokens),
            loss_sum=loss_sum,
            tensors=tensors,
            valid=not num_invalid,
        )

    def _sums(self, tensors: Tensors) -> Tensors:
        """At rank 0; tensors of their own, as a contribution must stay as it is until the next version."""
        layout = Layout.of(tensors)
        values = joined(tensors, layout, self.place)
        with self._together():
            for part in by_dtype(values, layout):
                dist.reduce(part, dst=0)
        return layout.views(values)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all ranks must do. Raises IslandBroken; torch has no better class for a peer that is gone."""
        try:
            yield
        except RuntimeError as error:
            raise broken(self.why_broken() or first_line(error)) from error


def broken(reason: str) -> IslandBroken:
    return IslandBroken(
        "the island broke: {reason}",
        reason=reason,
        hint="the same command goes on from the newest checkpoint; torchrun --max-restarts does it by itself",
    )


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


def joined(tensors: Tensors, layout: Layout, place: torch.device) -> Tensor:
    """All values in the order of the layout, as bytes: a copy."""
    values = [
        tensors[name].detach().to(place).contiguous().reshape(-1).view(torch.uint8) for name, *_ in layout.entries
    ]
    return torch.cat(values)


def by_dtype(values: Tensor, layout: Layout) -> Iterator[Tensor]:
    """What `joined` gives, in parts of one dtype."""
    first = 0
    for dtype, entries in groupby(zip(layout.entries, layout.sizes, strict=True), key=lambda entry: entry[0][1]):
        last = first + sum(size for _, size in entries)
        yield values[first:last].view(dtype)
        first = last
