"""What a node takes part in at a coordinator: one run for all nodes, or of several runs the one that it is lent to."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cuadrilla.link import wire
from cuadrilla.link.base import NodeReport, Progress, ToCoordinator, Version
from cuadrilla.link.offer import Offer

KEPT_VERSIONS = 2
"""A worker may still be reading the version before the newest one, or the last one that it was told of."""
KEPT_UPLOADS = 4
"""The memory of this many contributions is kept for the next round; more workers pay for fresh memory."""


class Receiver(Protocol):
    """Who hears the workers. Called from the threads of the link; it never raises."""

    def deliver(self, worker: str, message: ToCoordinator) -> None: ...

    def heard(self, worker: str, progress: Progress) -> None:
        """A heartbeat: must return at once, whatever else is going on."""

    def reported(self, worker: str, report: NodeReport) -> None:
        """How its machine is. Must return at once, too."""

    def left(self, worker: str, reason: str) -> None: ...


@dataclass(eq=False, kw_only=True)
class Served:
    """`contribution`: what the tensors of an answer look like; `parameters`: those of a version. `name`: of a run that
    nodes are lent to; "": what all others take part in."""

    receiver: Receiver
    offer: Offer
    parameters: wire.Layout
    contribution: wire.Layout
    name: str = ""
    upload_memory: wire.Memory = field(default_factory=lambda: wire.Memory(keep=KEPT_UPLOADS))
    _version_memory: wire.Memory = field(init=False, default_factory=lambda: wire.Memory(keep=1))
    _versions: dict[str, memoryview] = field(init=False, default_factory=dict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def publish(self, version: Version, *, read: set[str]) -> str:
        """Keep its parameters as they are now, for whoever is told this name of them; once for all of them.

        `read`: names of those that somebody may still be reading.
        """
        name = wire.version_name(version.version)
        if name not in self._versions:
            assert isinstance(version.parameters, Mapping)
            with self._lock:  # the oldest goes first: its memory can hold the new one
                for old in [old for old in list(self._versions)[: 1 - KEPT_VERSIONS] if old not in read]:
                    del self._versions[old]
            packed = self.parameters.pack(version.parameters, memory=self._version_memory)
            with self._lock:
                self._versions[name] = packed
        return name

    def version(self, name: str) -> memoryview | None:
        with self._lock:
            return self._versions.get(name)
