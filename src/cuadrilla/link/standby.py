"""The coordinator's side of a standby: says what a machine lacks to become the coordinator, and sends those files.

    journal/       records (`train/journal.py`): they begin with their CRC, which depends on all records before
    checkpoints/   the newest one; its manifest comes last

Invariants
* Only nodes that the coordinator's owner has named are answered, because with the keys a node can be the coordinator.
  When a node leaves the crew or is kicked, its name loses this right: the next node of that name is no standby.
* The announced version is read before the records are listed: a standby that has these has every version it hears of.
* No other file is sent, whatever its name (`COPIED_FILE`).
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cuadrilla.link.address import Address
from cuadrilla.link.base import Follow, Missing, Refused, node_of
from cuadrilla.link.identity import COORDINATOR_FILE
from cuadrilla.link.jobs import CHECKPOINT_PATH

COPIED_FILE = re.compile(rf"journal/v[0-9]{{8,12}}\.step|{CHECKPOINT_PATH.pattern}")


@dataclass(kw_only=True)
class StandbyServer:
    """`names`: the nodes that may follow. `crew`: the folder with the coordinator's keys; `run`: the run directory.
    `members`: names of nodes that are in the crew, or were at some time since this process began."""

    names: frozenset[str]
    crew: Path
    run: Path
    members: set[str]
    addresses: dict[str, str] = field(default_factory=dict)
    """By name of the standby: the address at which it would coordinate."""

    def joined(self, name: str) -> None:
        """A machine has got this name. If another one had it before, the name is no standby's any more."""
        if name in self.members:
            self.forget(name)
        self.members.add(name)

    def forget(self, name: str) -> None:
        """A node has left the crew or was kicked, so its name is no standby's any more."""
        self.names -= {name}
        self.addresses = {other: address for other, address in self.addresses.items() if other != name}

    def missing(self, name: str, request: Follow, *, announced: int) -> Missing:
        """What a standby lacks. `announced`: the newest version that workers know. Raises LinkError; Refused for a node
        that the owner has not named."""
        self._check(name)
        self.addresses = {**self.addresses, name: str(Address.parse(request.address))}
        files = {name: (self.crew / name).read_text() for name in (COORDINATOR_FILE, "nodes.json")}
        newest, manifest = self._newest_checkpoint()
        begin = request.version if self._has_record(request) else newest
        records = (int(path.stem[1:]) for path in (self.run / "journal").glob("v*.step"))
        wanted = tuple(sorted(version for version in records if version > begin))
        checkpoint = newest if manifest != request.manifest else None
        crew_files = json.dumps({**files, "announced": announced, "listen": request.address})
        return Missing(crew_files=crew_files, records=wanted, checkpoint=checkpoint)

    def _has_record(self, request: Follow) -> bool:
        """Whether the standby's newest record is here, too. Then so are all before it."""
        with suppress(FileNotFoundError), open(self.run / record_name(request.version), "rb") as file:
            return int.from_bytes(file.read(4), "little") == request.crc
        return False

    def file(self, worker: str, path: str) -> Path | None:
        """The file of the run with this name; None for one that is not copied. Raises as `missing`."""
        if not COPIED_FILE.fullmatch(path):
            return None
        self._check(node_of(worker))
        return self.run / path

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise Refused(
                "{name} has not been named as a standby: where the coordinator runs, cuadrilla up --standby {name} RUN",
                name=name,
            )

    def _newest_checkpoint(self) -> tuple[int, bytes]:
        """Version and manifest of the newest complete checkpoint; 0 and b"" if there is none."""
        found = {int(path.parent.name[1:]): path for path in (self.run / "checkpoints").glob("v*/manifest.json")}
        newest = max(found, default=0)
        return newest, found[newest].read_bytes() if found else b""


def record_name(version: int) -> str:
    """The path in its run of the record that leads to this version."""
    return f"journal/v{version:08d}.step"
