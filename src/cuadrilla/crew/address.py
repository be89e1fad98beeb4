"""Where others reach a crew's port: at the address of this machine's card, which may become another one meanwhile."""

import logging
import time

from cuadrilla.errors import LinkError
from cuadrilla.host.card import Whereabouts
from cuadrilla.link.address import Address
from cuadrilla.link.server import CrewServer

FOLLOW_SECONDS = 2.0

log = logging.getLogger(__name__)


class CrewAddress:
    """Of a server that listens at `address`. Used by one thread."""

    def __init__(self, server: CrewServer, address: Address) -> None:
        self.address = address
        self._server = server
        self._whereabouts = Whereabouts(address.host)
        self._listened = {address}
        self._followed_at = 0.0

    def follow(self) -> Address | None:
        """Listen at the address that the card has now, if it has changed; the new one, or None. To be called often.

        The old one is listened at as well: it may come back.
        """
        if time.monotonic() - self._followed_at < FOLLOW_SECONDS:
            return None
        self._followed_at = time.monotonic()
        host = self._whereabouts.moved_to()
        if not host:
            return None
        address = Address(host, self.address.port)
        if address not in self._listened:
            try:
                self._server.serve(str(address))
            except LinkError as error:
                log.warning("this machine's address is %s now: %s", host, error.message)
                return None
        self.address, self._whereabouts = address, Whereabouts(host)
        self._listened.add(address)
        return address
