"""An open crew: its port, and who may come in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cuadrilla.home import Home
from cuadrilla.link.address import Address
from cuadrilla.link.identity import key_hash
from cuadrilla.link.server import CrewServer


@dataclass(kw_only=True)
class OpenCrew:
    """Used by one thread. `home`: of the machine whose owner invites and pauses; None in practice. `pids`: the
    processes of its own workers. Raises LinkError where it cannot listen.
    """

    server: CrewServer
    listen: Address
    home: Home | None = None
    pids: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at = Address(self.listen.host, self.server.serve(str(self.listen)))

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
        """Who may come, and who may not any more: a few times a second."""
        self.server.end_kicked()
        if self.home is not None:
            self.server.invites.adopt(self.home.take_invites())
