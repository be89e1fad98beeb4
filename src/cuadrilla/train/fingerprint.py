"""Fingerprint of the program that a machine computes with. All workers of a run must have the same, strict or not.

Two versions may build different units, losses or sums from the same configuration, and nobody would notice.
"""

import hashlib
import sys
from pathlib import Path

from torch import nn

from cuadrilla.model.task import Task
from cuadrilla.train.checkpoint import tensors_sha256
from cuadrilla.version import __version__

DECIDING = ("data/loader.py", "data/order.py", "model/*.py", "sync/*.py", "train/loop.py", "train/precision.py")
"""The files that decide what a unit holds and how it becomes a contribution, relative to this package."""
SHOWN_DIGITS = 12


def code_fingerprint(task: Task, model: nn.Module) -> dict[str, str]:
    """The version of cuadrilla, a hash of the code that turns a unit of `task` into a contribution, and one of the
    model's frozen parameters, if it has any: those are never sent, so each machine makes its own.

    Files that a user's task imports are not in it: other machines get them from the coordinator, by hash.
    """
    package = Path(__file__).parents[1]
    files = [path for pattern in DECIDING for path in sorted(package.glob(pattern))]
    own = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    digest = hashlib.sha256()
    for path in [*files, *([Path(own)] if own else [])]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    found = {"cuadrilla": __version__, "model code": digest.hexdigest()[:SHOWN_DIGITS]}
    if frozen := {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}:
        found["frozen parameters"] = tensors_sha256(frozen)[:SHOWN_DIGITS]
    return found
