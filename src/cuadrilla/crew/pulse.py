"""Whether the other ranks of an island are still there, told in torch's own store.

Gloo tells a rank that another one has gone, but not always: a send that begins as its peer's machine goes can wait for
as long as the group does (seen with a container that was killed while weights were handed on). So each rank counts up a
number, and looks at those of the others. Where one stands still, or the store does not answer, the process ends: what
its main thread waits for cannot be broken off. torchrun then does what it does for any rank that has failed.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # exported without saying so

from cuadrilla.errors import LinkError
from cuadrilla.messages import Message

PULSE_SECONDS = 2.0
LOST_SECONDS = 45.0
"""Longer than a process of ours is ever kept from counting; much shorter than the group's own patience."""
ANSWER_SECONDS = 10.0

log = logging.getLogger(__name__)


class Pulse:
    """Of one rank, once all have started. `store`: a connection of its own. `lost` hears once why it cannot go on."""

    def __init__(
        self, store: Store, *, rank: int, num_ranks: int, lost: "Callable[[Message], None] | None" = None
    ) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._lost = lost or _end
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pulse", daemon=True)
        store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._thread.start()

    def end(self) -> None:
        """This rank has nothing to wait for any more."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        count, began = 0, time.monotonic()
        seen = {other: (b"", began) for other in self._others}
        while not self._ended.is_set():
            count += 1
            with suppress(RuntimeError):  # it may answer the next time
                self._store.set(_key(self._rank), str(count))
                for other in self._others:
                    told = self._store.get(_key(other))
                    if told != seen[other][0]:
                        seen[other] = told, time.monotonic()
            for other, (_, since) in seen.items():  # all of them, the first one for its store, where that is gone
                silent = time.monotonic() - since
                if silent > LOST_SECONDS and not self._ended.is_set():
                    self._lost(Message("rank {rank} has been silent for {seconds:.0f} s", rank=other, seconds=silent))
                    return
            self._ended.wait(PULSE_SECONDS)


def _key(rank: int) -> str:
    return f"pulse/{rank}"


def _end(reason: Message) -> None:
    log.error("%s: this rank ends", reason)
    os._exit(LinkError.exit_code)
