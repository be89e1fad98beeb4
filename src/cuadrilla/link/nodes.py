"""The nodes of a crew: their names and the SHA-256 of their tokens.

Invariants
* A name has one token and a token one name, until the name is removed.
* An entry `ana` is valid for all workers of that node, `ana/cuda:0` as well as `ana/cpu`.
"""

import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cuadrilla.errors import LinkError
from cuadrilla.link.base import COORDINATOR, MAX_NAME, check_node_name
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, make_private, write_json

TOKEN_BYTES = 32


class AllowList:
    """Names of nodes and the SHA-256 of their tokens, in a JSON file. Thread-safe.

    Each look-up reads the file, so a change by another process (a `kick`) counts at the next one. A damaged file raises
    LinkError and lets nobody in. If two processes change the file at the same moment, one gets a ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def nodes(self) -> dict[str, bytes]:
        """The token hash of each node. Raises LinkError."""
        try:
            written = json.loads(self._path.read_bytes())["nodes"]
            return {name: bytes.fromhex(value) for name, value in written.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            hint = "restore it from a backup, or delete it and let every machine join again"
            raise LinkError("{path} cannot be read, or is not a list of nodes", path=self._path, hint=hint) from None

    def name_of(self, token: str) -> str | None:
        """The node with this token; None for a stranger. It takes the same time for wrong and right tokens."""
        given = _hashed(token)
        found = [name for name, known in self.nodes().items() if hmac.compare_digest(known, given)]
        return found[0] if found else None

    def add(self, name: str, *, own: str = "") -> tuple[str, str]:
        """Add a node. Returns its name (if another machine has `name`, one like `name-2`) and its token, of which only
        the hash is kept. `own`: the name that the machine already has; its old token ends. Raises LinkError.
        """
        check_node_name(name)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with self._changing() as nodes:
            nodes.pop(own, None)
            suffixes = ["", *(f"-{number}" for number in range(2, len(nodes) + 4))]  # cloned machines have one name
            free = (name[: MAX_NAME - len(suffix)] + suffix for suffix in suffixes)
            name = next(each for each in free if each not in nodes and each != COORDINATOR)
            nodes[name] = _hashed(token)
        return name, token

    def remove(self, name: str) -> None:
        """Remove a node. Raises LinkError if none has that name."""
        with self._changing() as nodes:
            if nodes.pop(name, None) is None:
                names = ", ".join(sorted(nodes)) or Message("nobody")
                raise LinkError("no node is named {name!r}", name=name[:80], hint="in this crew: {names}", names=names)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, bytes]]:
        """The nodes, written back at the end. A lock between processes makes sure that no removal gets lost."""
        make_private(self._path.parent)
        lock = self._path.with_name(f"{self._path.name}.lock")
        with self._lock, FolderLock(lock):
            nodes = self.nodes()
            yield nodes
            write_json(self._path, {"nodes": {name: value.hex() for name, value in sorted(nodes.items())}})


def _hashed(token: str) -> bytes:
    """The hash of a token, all that is kept of it."""
    return hashlib.sha256(token.encode()).digest()
