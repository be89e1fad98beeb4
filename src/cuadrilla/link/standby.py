"""The coordinator's side of a standby: sends the files that a machine needs to become the coordinator, as they grow.

    standby.json       keys and nodes of the crew, the newest announced version, the standby's future address
    run/journal/       segments, which grow
    run/checkpoints/   the newest one; its manifest comes last

Invariants
* Only nodes that the coordinator's owner has named are answered, because with the keys a node can be the coordinator.
  When a node leaves the crew, its name loses this right: the next node of that name is no standby.
* The journal does not wait for a checkpoint: after every MiB of one, its new bytes are sent.
* The announced version is read before the journal and sent after it: a standby that hears of a version has it.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from cuadrilla.home import Home
from cuadrilla.link import wire
from cuadrilla.link.address import Address
from cuadrilla.link.base import FilePart, Follow, Refused
from cuadrilla.link.identity import COORDINATOR_FILE

POLL_SECONDS = 0.5
NUM_CHUNKS = 4  # chunks of a checkpoint that are sent between two polls of the journal
CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@dataclass(kw_only=True)
class StandbyServer:
    """`names`: the nodes that may follow. `home`: that of the coordinator's machine; `run`: the run directory."""

    names: frozenset[str] = frozenset()
    home: Home = field(default_factory=lambda: Home(Path()))
    run: Path = Path()
    announced: int = 0
    """The newest version that was sent to workers."""
    closing: threading.Event = field(default_factory=threading.Event)
    addresses: dict[str, str] = field(default_factory=dict)
    """By name of the standby: the address at which it would coordinate."""

    def forget(self, name: str) -> None:
        """A node has left the crew, so its name is no standby's any more."""
        self.names -= {name}
        self.addresses = {other: address for other, address in self.addresses.items() if other != name}

    def grown(self, name: str, request: Follow, *, goes_on: Callable[[], bool]) -> Iterator[bytes]:
        """The bytes that the standby lacks, as long as its call goes on: a `FilePart`, its bytes, the next `FilePart`.
        Raises LinkError; Refused for a node that the owner has not named."""
        if name not in self.names:
            template = (
                "{name} has not been named as a standby: where the coordinator runs, cuadrilla up --standby {name} RUN"
            )
            raise Refused(template, name=name)
        self.addresses = {**self.addresses, name: str(Address.parse(request.address))}
        known, held, journal, checkpoint = b"", request.manifest, dict[Path, int](), iter(list[bytes]())
        versions = {manifest: version for version, manifest in self._manifests()}
        begin = versions.get(held, max(versions.values(), default=0))
        while goes_on() and not self.closing.is_set():
            before, known = known, self._known(request.address)
            yield from self._segments(begin, journal)
            if known != before:
                yield from _parts("standby.json", [known], num_bytes=len(known))
            piece = list(islice(checkpoint, 2 * NUM_CHUNKS))
            yield from piece
            version, newest = max(self._manifests(), default=(0, held))
            if not piece and newest != held:
                held, checkpoint = newest, self._checkpoint(version)
            elif not piece:
                self.closing.wait(POLL_SECONDS)

    def _known(self, address: str) -> bytes:
        files = {name: (self.home.crew / name).read_text() for name in (COORDINATOR_FILE, "nodes.json")}
        return json.dumps({**files, "announced": self.announced, "listen": address}).encode()

    def _manifests(self) -> Iterator[tuple[int, bytes]]:
        """Version and manifest of each complete checkpoint."""
        for path in (self.run / "checkpoints").glob("v*/manifest.json"):
            with suppress(FileNotFoundError):  # removed just now
                yield int(path.parent.name[1:]), path.read_bytes()

    def _segments(self, begin: int, sent: dict[Path, int]) -> Iterator[bytes]:
        """The new bytes of the journal's segments from version `begin` on. `sent`: bytes sent of each segment."""
        for path in sorted((self.run / "journal").glob("v*.step")):
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                if int(path.stem[1:]) > begin and size > sent.get(path, -1):
                    chunks = wire.file_chunks(path, sent.get(path, 0), end=size)
                    yield from _parts(f"run/journal/{path.name}", chunks, num_bytes=size)
                    sent[path] = size

    def _checkpoint(self, version: int) -> Iterator[bytes]:
        folder = f"checkpoints/v{version:08d}"
        with suppress(FileNotFoundError):  # removed meanwhile: there is a newer one
            for name in CHECKPOINT_FILES:
                path = self.run / folder / name
                yield from _parts(f"run/{folder}/{name}", wire.file_chunks(path), num_bytes=path.stat().st_size)


def _parts(name: str, chunks: Iterable[bytes], *, num_bytes: int) -> Iterator[bytes]:
    """Each chunk after a `FilePart`; for an empty file one empty chunk."""
    part = wire.encode(FilePart(name=name, num_bytes=num_bytes))
    for chunk in chunks if num_bytes else [b""]:
        yield from (part, chunk)
