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
ENDED = b"ended"

log = logging.getLogger(__name__)


class Pulse:
    """Of one rank. `store`: a connection of its own. `lost` hears once why this rank cannot go on.

    Made by each rank before any of them begins to `watch`.
    """

    def __init__(
        self, store: Store, *, rank: int, num_ranks: int, lost: "Callable[[Message], None] | None" = None
    ) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._lost = lost or _end
        self._ended = threading.Event()
        self._count = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._thread = threading.Thread(target=self._work, name="pulse", daemon=True)
        store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._beat()

    def watch(self) -> None:
        """From now on all are expected to be there."""
        self._thread.start()

    def end(self) -> None:
        """This rank leaves, and is not missed. Safe to call twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(RuntimeError):  # the store went with the rank, or the torchrun, that kept it
            self._store.set(_key(self._rank), ENDED.decode())
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        answered = time.monotonic()
        while not self._ended.wait(PULSE_SECONDS):
            try:
                self._beat()
                gone = self._gone()
                answered = time.monotonic()
            except RuntimeError:
                if time.monotonic() - answered < LOST_SECONDS:
                    continue
                gone = Message("the store of all ranks does not answer")
            if gone is not None and not self._ended.is_set():
                self._lost(gone)
                return

    def _beat(self) -> None:
        self._count += 1
        self._store.set(_key(self._rank), str(self._count))

    def _gone(self) -> Message | None:
        for other in self._others:
            told, now = self._store.get(_key(other)), time.monotonic()
            before, since = self._seen.get(other, (b"", now))
            if told == ENDED or told != before:
                self._seen[other] = told, now
            elif now - since > LOST_SECONDS:
                return Message("rank {rank} has been silent for {seconds:.0f} s", rank=other, seconds=now - since)
        return None


def _key(rank: int) -> str:
    return f"pulse/{rank}"


def _end(reason: Message) -> None:
    log.error("%s: this rank ends", reason)
    os._exit(LinkError.exit_code)
