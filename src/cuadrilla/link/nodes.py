"""The allow-list: which nodes are in a crew, by the SHA-256 of their public keys.

Invariants
* A certificate of the crew's CA gives no right by itself; its key must be in the list.
* A name belongs to one key and a key to one name, until the name is removed.
* The published enrol key is never a node's.
* What the list says of `ana` holds for all its workers, `ana/cuda:0` as well as `ana/cpu` (`names.py`).
"""

import itertools
import json
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from cuadrilla.errors import LinkError
from cuadrilla.link.invite import MAX_NAME, NODE_NAME, check_node_name
from cuadrilla.link.names import COORDINATOR
from cuadrilla.link.tls import is_enrol, key_hash
from cuadrilla.messages import Message
from cuadrilla.rundir import FolderLock, make_private, write_json


class NameTaken(LinkError):
    """Under another name the machine could get in."""


class AllowList:
    """Names of nodes and the SHA-256 of their keys, in a JSON file. Thread-safe.

    Each look-up reads the file: a change by another process (a `kick`) counts from the next one on. A damaged file
    raises LinkError and lets nobody in. Two processes that change it at the same moment: one gets a ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def nodes(self) -> dict[str, bytes]:
        """Key hash by name. Raises LinkError."""
        try:
            written = json.loads(self._path.read_bytes())["nodes"]
            nodes = {name: bytes.fromhex(value) for name, value in written.items()}
            sound = all(NODE_NAME.fullmatch(name) and len(nodes[name]) == 32 for name in nodes)
            if not sound or len(set(nodes.values())) != len(nodes):
                raise ValueError
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            hint = "restore it from a backup, or delete it and let every machine join again"
            raise LinkError("{path} cannot be read, or is not a list of nodes", path=self._path, hint=hint) from None
        return nodes

    def name_of(self, certificate: bytes) -> str | None:
        """Which node owns this PEM certificate's key; None for a stranger."""
        wanted = key_hash(certificate)
        return next((name for name, known in self.nodes().items() if known == wanted), None)

    def add(self, name: str, *, certificate: bytes, numbered: bool = False) -> str:
        """Let a certificate's key in under a name, and return the name; the same pair again is no change.

        `numbered`: a key that is there keeps its name, and one whose name is another's gets the next free one such as
        `name-2`. Raises LinkError; NameTaken when another name would do.
        """
        check_node_name(name)
        if is_enrol(certificate):  # anybody can sign with that key: a node that had it could be anybody
            raise LinkError("a node cannot use the published enrol key", hint="let the node make its own key")
        new = key_hash(certificate)
        with self._changing() as nodes:
            own = next((own for own, known in nodes.items() if known == new), "")
            if numbered:
                name = own or _free(name, {*nodes, COORDINATOR})
            if nodes.get(name, new) != new or (name == COORDINATOR and own != name):
                hint = "join under another name, or remove the old one with `cuadrilla kick {name}`"
                raise NameTaken("another machine is in this crew under the name {name}", name=name, hint=hint)
            if own not in ("", name):
                hint = "use that name, or remove it with `cuadrilla kick {name}`"
                raise NameTaken("this machine's key is in this crew under the name {name}", name=own, hint=hint)
            nodes[name] = new
        return name

    def remove(self, name: str) -> None:
        """Let a node in no more. Raises LinkError if there is none of that name."""
        with self._changing() as nodes:
            if nodes.pop(name, None) is None:
                names = ", ".join(sorted(nodes)) or Message("nobody")
                raise LinkError("no node is named {name!r}", name=name[:80], hint="in this crew: {names}", names=names)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, bytes]]:
        """The nodes, written back at the end. Two processes never change them at once: no removal gets lost."""
        make_private(self._path.parent)
        lock = self._path.with_name(f"{self._path.name}.lock")
        with self._lock, FolderLock(lock, purpose=Message("changing the list of nodes")):
            nodes = self.nodes()
            yield nodes
            write_json(self._path, {"nodes": {name: value.hex() for name, value in sorted(nodes.items())}})


def _free(name: str, taken: Collection[str]) -> str:
    """`name`, or `name-2`, `name-3`, ...: cloned machines have one host name."""
    suffixes = (f"-{number}" for number in itertools.count(2))
    numbered = (name[: MAX_NAME - len(suffix)] + suffix for suffix in suffixes)
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
