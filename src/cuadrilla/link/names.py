"""What workers are called: by their node, or, where a node works with several devices, by node and device.

Only the node has proved who it is; it says itself which devices it has.
"""

import re

from cuadrilla.errors import LinkError

COORDINATOR = "coordinator"
"""What the coordinator's own machine is called among those of a run: no node may."""
MAX_DEVICES = 8
"""Workers of one node."""
JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""What a job is called on the link, and in file names."""
OWN_WORKER = re.compile(r"(here|place)(-[0-9]+)?")
"""What workers of the coordinator's own machine are called: no node may be."""
_DEVICE = re.compile(r"(cpu|mps|cuda|xpu)(:[0-9]{1,2})?(\.[2-9])?")


def worker_name(node: str, device: str) -> str:
    """What the worker is called that a node has for this device; "" for a node that has only one. Raises LinkError."""
    if device and not _DEVICE.fullmatch(device):
        raise LinkError("{device!r} is not a device", device=device[:80], hint="such as cuda:0, or cpu")
    return f"{node}/{device}" if device else node


def node_of(worker: str) -> str:
    return worker.partition("/")[0]
