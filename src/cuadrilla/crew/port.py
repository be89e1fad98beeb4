"""An open crew: its port, who may come in, and where others reach it, which may become another address meanwhile."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.host.card import Whereabouts
from cuadrilla.link.address import Address
from cuadrilla.link.identity import key_hash
from cuadrilla.link.server import CrewServer

FOLLOW_SECONDS = 2.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class OpenCrew:
    """Used by one thread. `home`: of the machine whose owner invites and pauses; None in practice. `moved` is called
    with an address that came later. `pids`: the processes of its own workers. Raises LinkError where it cannot listen.
    """

    server: CrewServer
    listen: Address
    home: Home | None = None
    moved: Callable[[str], None] | None = None
    pids: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at = Address(self.listen.host, self.server.serve(str(self.listen)))
        self._whereabouts, self._followed_at = Whereabouts(self._at.host), 0.0
        self._listened = {self._at}

    @property
    def address(self) -> str:
        """What other machines dial."""
        return str(self._at)

    @property
    def key_hash(self) -> bytes:
        return key_hash(self.server.keys.certificate)

    def open_here(self) -> str:
        """What workers of this machine dial, whatever becomes of its card. Raises LinkError."""
        if self._at.is_loopback:
            return self.address
        here = Address("127.0.0.1", self._at.port)
        self.server.serve(str(here))
        return str(here)

    def poll(self) -> None:
        """Who may come, who may not any more, and where to: a few times a second."""
        self.server.end_kicked()
        if self.home is not None:
            self.server.adopt_invites(self.home.take_invites())
        if time.monotonic() - self._followed_at > FOLLOW_SECONDS:
            self._followed_at = time.monotonic()
            self._follow()

    def _follow(self) -> None:
        """Listen at the address that the card has now. The old one is listened at as well: it may come back."""
        host = self._whereabouts.moved_to()
        if not host:
            return
        address = Address(host, self._at.port)
        if address not in self._listened:
            try:
                self.server.serve(str(address))
            except LinkError as error:
                log.warning("this machine's address is %s now: %s", host, error.message)
                return
        self._at, self._whereabouts = address, Whereabouts(host)
        self._listened.add(address)
        if self.moved is not None:
            self.moved(self.address)
