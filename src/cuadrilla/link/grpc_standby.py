"""The coordinator's half of a standby: the crew's keys, and checkpoint and journal as they grow.

Invariants
* Only listed nodes that the coordinator's owner has named are answered: with the keys a node can be the coordinator.
  A name that was given up is no standby's any more, whoever has it next.
* Only files of a checkpoint or of the journal are given, by names that fit exactly.
* What was announced is read before the files are listed: whoever copies them has at least that version.
"""

import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.address import Address
from cuadrilla.link.grpc_calls import cut_off, only, reads, refuse, serialize
from cuadrilla.link.tls import COORDINATOR_FILES
from cuadrilla.messages import Message
from cuadrilla.rundir import write_json

CUT_SECONDS, COPY_SECONDS = 10.0, 600.0
CHECKPOINT_FILE = re.compile(
    r"checkpoints/v(\d{8,})/(model\.safetensors|optimizer\.safetensors|state\.json|manifest\.json)"
)
JOURNAL_FILE = re.compile(r"journal/v(\d{8,})\.log")


@dataclass
class StandbyServer:
    """`names`: who may ask. `keys`: the folder of the crew's keys; `run`: the run directory."""

    names: frozenset[str] = frozenset()
    keys: Path = Path()
    run: Path = Path()
    announced: int = 0
    """The newest version that workers have been told."""
    paused: frozenset[str] = frozenset()
    """Nodes that are to wait, also where the crew goes on."""
    _incarnation: int = field(default_factory=lambda: secrets.randbits(63))
    _addresses: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def addresses(self) -> list[str]:
        """Where the crew would go on, as the standbys have said."""
        with self._lock:
            return sorted(self._addresses.values())

    def forget(self, name: str) -> None:
        """The node of that name has left the crew."""
        with self._lock:
            self.names -= {name}
            self._addresses.pop(name, None)

    def handlers(self, caller: Callable[[Any], str]) -> dict[str, Any]:
        """`caller(context)` names the node that calls, and ends the call of anybody else."""
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler

        def standby(context: Any, *, seconds: float) -> str:
            name = caller(context)
            if name not in self.names:
                refuse(context, Message("{name} has not been named as a standby", name=name))
            cut_off(context, after=seconds)
            return name

        def keys(_requests: Iterator[pb.Nothing], context: Any) -> pb.CrewKeys:
            standby(context, seconds=CUT_SECONDS)
            return pb.CrewKeys(files={name: (self.keys / name).read_bytes() for name in COORDINATOR_FILES})

        def growth(requests: Iterator[pb.Following], context: Any) -> pb.Grown:
            name = standby(context, seconds=CUT_SECONDS)
            self._place(name, only(requests, context).address, context)
            announced, nodes = self.announced, (self.keys / "nodes.json").read_bytes()
            files, paused = list(self._files()), sorted(self.paused)
            return pb.Grown(announced=announced, incarnation=self._incarnation, nodes=nodes, files=files, paused=paused)

        def copy(requests: Iterator[pb.CopyRequest], context: Any) -> Iterator[pb.Chunk]:
            standby(context, seconds=COPY_SECONDS)
            request = only(requests, context)
            known = CHECKPOINT_FILE.fullmatch(request.path) or JOURNAL_FILE.fullmatch(request.path)
            try:
                if not known:
                    raise FileNotFoundError
                yield from wire.file_chunks(self.run / request.path, request.offset, end=request.end)
            except FileNotFoundError:
                told = Message("there is no {name} here", name=request.path[:100])
                refuse(context, told, code=grpc.StatusCode.NOT_FOUND)

        return {
            "Keys": unary(reads(keys, pb.Nothing), response_serializer=serialize),
            "Growth": unary(reads(growth, pb.Following), response_serializer=serialize),
            "Copy": stream(reads(copy, pb.CopyRequest), response_serializer=serialize),
        }

    def _place(self, name: str, address: str, context: Any) -> None:
        try:
            Address.parse(address).check_dialled()
        except LinkError as error:
            refuse(context, error.message, code=grpc.StatusCode.INVALID_ARGUMENT)
        with self._lock:
            if self._addresses.get(name) != address:
                self._addresses[name] = address
                write_json(self.keys / "standbys.json", self._addresses)

    def _files(self) -> Iterator[pb.GrownFile]:
        """Of the newest checkpoint and of the journal; what vanishes meanwhile is left out."""
        complete = [path.parent for path in (self.run / "checkpoints").glob("v*/manifest.json")]
        newest = max(complete, key=lambda path: int(path.name[1:]), default=None)
        found = [*(newest.iterdir() if newest else []), *(self.run / "journal").glob("v*.log")]
        for path in found:
            try:
                yield pb.GrownFile(path=path.relative_to(self.run).as_posix(), num_bytes=path.stat().st_size)
            except FileNotFoundError:
                continue
