"""This machine in a crew: the address that it dials, its token, the run that it fetches, its owner's rules."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cuadrilla.config import Config
from cuadrilla.crew.bundle import fetch
from cuadrilla.crew.idle_policy import IdlePolicy
from cuadrilla.errors import LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.link.base import RunDescription
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import load_node
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_config


@dataclass(kw_only=True)
class Node:
    """Used by several threads. `run`: the run directory, on the coordinator's machine; None: the run is fetched.

    `tell` gets lines about what is fetched, `report` now and then a line about the work. `idle_policy`: when to wait.
    """

    home: Home
    crew: Joined
    run: RunDir | None = None
    tell: Callable[[str], None] = lambda _text: None
    report: Callable[[str], None] | None = None
    idle_policy: IdlePolicy | None = None
    heard_at: float = 0.0
    """When the coordinator last sent something, in monotonic seconds."""
    standbys: tuple[str, ...] = ()
    """Addresses at which the run goes on if the coordinator is gone for good."""

    def __post_init__(self) -> None:
        self._identity = load_node(self.crew.folder)

    def connect(self, address: str, *, device: str = "") -> Connection:
        """A connection for a worker with this device."""
        return Connection(address, identity=self._identity, device=device)

    def describe(self, connection: Connection) -> RunDescription:
        """What the coordinator trains. A new address or term of it is stored. Raises LinkError, also for a coordinator
        of an earlier term, which was believed dead; ResourceError."""
        description = connection.describe()
        if description.term < self.crew.term:
            raise LinkError(
                "{address} is this crew's old coordinator: another machine was promoted since (term {term}, not"
                " {known})",
                address=connection.address,
                term=description.term,
                known=self.crew.term,
                hint="stop it there (cuadrilla stop); the crew goes on where it was promoted",
            )
        self.crew = replace(self.crew, term=description.term, address=connection.address)
        if self.run is None and self.crew not in self.home.joined():  # a full disk keeps no machine from joining again
            self.home.remember(self.crew)
        return description

    def found_run(self, connection: Connection) -> tuple[Config, Path]:
        """Fetch the run; return its configuration, and the folder to which its paths are relative. Raises LinkError
        unless the coordinator answers, and as `fetch`."""
        description = self.describe(connection)
        if self.run is not None:
            return read_run_config(self.run), self.run.path
        found = fetch(connection, description, home=self.home, report=self.tell)
        self.tell_working()
        return found

    def tell_working(self) -> None:
        template = "working    as {name} for {address}; Ctrl-C leaves"
        self.tell(Message(template, name=self.crew.name, address=self.crew.address))
