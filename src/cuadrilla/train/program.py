"""Which program a machine computes with: what all workers of a run must have in common, strict or not.

Two versions may build other units, other losses or other sums from the same configuration, and nobody would notice.
"""

import hashlib
import sys
from pathlib import Path

import cuadrilla
from cuadrilla.model.task import Task

DECIDING = ("data/loader.py", "data/order.py", "model/*.py", "sync/*.py", "train/loop.py", "train/precision.py")
"""What a unit holds and how it becomes a contribution, relative to this package."""
SHOWN_DIGITS = 12


def program(task: Task) -> dict[str, str]:
    """The version of cuadrilla, and a hash of the code that turns a unit of `task` into a contribution.

    What a user's file imports is not in it: other machines get those files from the coordinator, by hash.
    """
    package = Path(cuadrilla.__file__).parent
    files = [path for pattern in DECIDING for path in sorted(package.glob(pattern))]
    own = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    digest = hashlib.sha256()
    for path in [*files, *([Path(own)] if own else [])]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return {"cuadrilla": cuadrilla.__version__, "model code": digest.hexdigest()[:SHOWN_DIGITS]}
