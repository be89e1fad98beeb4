"""The home folder: what a machine keeps for all its runs. It is CUADRILLA_HOME, or the system's folder for user data.

crew/            the crew that this machine coordinates: keys, nodes.json, open.json while it runs, invites/
joined/KEY/      a crew that this machine has joined: keys, crew.json. KEY is the hash of its coordinator's key
standby/KEY/     a crew for which this machine is a standby: keys of its coordinator, a copy of its run
cache/           data and code of runs, fetched from a coordinator
trusted.json     hashes of code that this machine's owner has approved
paused           exists while this machine's owner has paused the work for others
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from cuadrilla.errors import LinkError
from cuadrilla.rundir import make_private, read_object, write_json


@dataclass(frozen=True)
class Joined:
    folder: Path
    address: str
    name: str
    term: int = 0
    """How many times the crew has promoted a standby, as far as this machine knows."""


class Home:
    """Paths in the home folder. The constructor creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.crew = path / "crew"
        self.nodes = self.crew / "nodes.json"
        self.open_file = self.crew / "open.json"
        self.invites = self.crew / "invites"
        self.cache = path / "cache"
        self.jobs = path / "jobs"  # runs that this machine trains for others, until they end

    @classmethod
    def of_user(cls) -> "Home":
        given = os.environ.get("CUADRILLA_HOME")
        return cls(Path(given).expanduser() if given else platformdirs.user_data_path("cuadrilla"))

    @property
    def term(self) -> int:
        """How many times a standby has taken over the crew that this machine coordinates."""
        return int(read_object(self.crew / "term.json").get("term", 0))

    def begin_term(self, term: int) -> None:
        """Raises ResourceError."""
        write_json(self.crew / "term.json", {"term": term})

    def joined_folder(self, key_hash: bytes) -> Path:
        return self.path / "joined" / key_hash.hex()[:32]

    def standby_folder(self, crew: Joined) -> Path:
        return self.path / "standby" / crew.folder.name

    def joined(self) -> list[Joined]:
        """The crews this machine has joined, by address."""
        found = []
        for file in (self.path / "joined").glob("*/crew.json"):
            value = read_object(file)
            if value:
                known = {"address": value["address"], "name": value["name"], "term": value.get("term", 0)}
                found.append(Joined(folder=file.parent, **known))
        return sorted(found, key=lambda crew: crew.address)

    def find_crew(self, address: str) -> Joined | None:
        """The crew to work for without an invite: the one at `address`, or else the only one this machine has joined.

        A coordinator may have moved to a new `address`: its key proves who it is. Raises LinkError if `address` is
        empty and this machine has joined several crews.
        """
        joined = self.joined()
        found = [crew for crew in joined if crew.address == address] or joined
        if len(found) == 1:
            return replace(found[0], address=address or found[0].address)
        if joined and not address:
            raise LinkError(
                "this machine has joined {crews} crews: {addresses}",
                crews=len(joined),
                addresses=", ".join(crew.address for crew in joined),
                hint="name one: cuadrilla join ADDRESS:PORT",
            )
        return None

    def remember(self, crew: Joined) -> None:
        """Store a crew's address, name and term. Raises ResourceError."""
        write_json(crew.folder / "crew.json", {"address": crew.address, "name": crew.name, "term": crew.term})

    def trusted(self) -> set[str]:
        """Hashes (SHA-256, hexadecimal) of code that may run here."""
        return set(read_object(self.path / "trusted.json").get("sha256", []))

    def trust(self, sha256: str) -> None:
        """Approve code by its hash. Raises ResourceError."""
        make_private(self.path)
        write_json(self.path / "trusted.json", {"sha256": sorted({*self.trusted(), sha256})})

    @property
    def is_paused(self) -> bool:
        """Whether the owner has paused the work for others on this machine."""
        return (self.path / "paused").exists()

    def pause(self) -> None:
        """Raises ResourceError."""
        make_private(self.path)
        write_json(self.path / "paused", {})

    def unpause(self) -> None:
        (self.path / "paused").unlink(missing_ok=True)

    def open_crew(self) -> dict[str, Any]:
        """Address, pid, run and key hash of the coordinator that runs on this machine. Raises LinkError without one."""
        value = read_object(self.open_file)
        if not value:
            raise LinkError("no coordinator runs on this machine", hint="start one: cuadrilla up RUN")
        return value
