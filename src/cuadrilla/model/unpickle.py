"""The one place where a pickle is opened: a child process that reads a torch file and leaves safetensors behind.

    python -m cuadrilla.model.unpickle SOURCE TARGET

torch's restricted reader (`weights_only=True`) builds tensors and plain values only, and refuses every other name.
Behind it, in case it has a hole (`host/sandbox.py`): the process has next to no environment; on Linux it may open no
socket and start no program from the moment it reads (seccomp); memory, processor time and the size of what it writes
are limited. It says on stdout, before it reads, what it could not give up.
"""

import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cuadrilla.errors import CheckpointError, ResourceError
from cuadrilla.host.sandbox import MAX_REASON, Ended, enter_sandbox, run_in_sandbox
from cuadrilla.model.weights import require_weights

TIMEOUT_SECONDS = 900.0
MEMORY_PER_BYTE = 4
SPARE_BYTES = 2**30
NESTED = ("state_dict", "model_state_dict", "model")
"""Where training programs put the weights beside other things."""


def read_pickled(source: Path, target: Path, *, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Turn a torch file into safetensors, in a child. Returns what the child could not be kept from, "" if nothing.

    Raises CheckpointError with the child's reason, ResourceError when there is no room for the result.
    """
    require_weights(source)
    paths = (str(source.resolve()), str(target.resolve()))
    ended = run_in_sandbox(__name__, *paths, folder=target.parent, timeout_seconds=timeout_seconds)
    if ended.code is None:
        raise CheckpointError(
            "{path} was not read within {seconds:.0f} s",
            path=source,
            seconds=timeout_seconds,
            hint="copy the original again",
        )
    if ended.code:
        if "No space left" in ended.complaint:
            raise ResourceError("no room to write {path}", path=target, hint="free some space or choose another disk")
        raise CheckpointError(
            "{path} cannot be read: {reason}",
            path=source,
            reason=_reason(ended),
            hint="only tensors and plain values are read; ask its author for safetensors",
        )
    return ended.said.strip()


def _reason(ended: Ended) -> str:
    refused = [line.strip() for line in ended.complaint.splitlines() if "unsupported" in line.lower()]
    return refused[0][:MAX_REASON] if refused else ended.reason


def weights_in(value: Any) -> dict[str, Tensor]:
    """The named tensors of what a torch file held. Raises ValueError if there are none."""
    if isinstance(value, dict):
        for inner in (value, *(value.get(key) for key in NESTED)):
            if isinstance(inner, dict):
                found = {key: tensor for key, tensor in inner.items() if isinstance(tensor, Tensor)}
                if found and all(isinstance(key, str) for key in found):
                    return found
    raise ValueError("it holds no named tensors")


def main(source: Path, target: Path) -> None:
    torch.set_num_threads(1)
    num_bytes = MEMORY_PER_BYTE * source.stat().st_size + SPARE_BYTES
    sys.stdout.write(enter_sandbox(num_bytes, cpu_seconds=int(TIMEOUT_SECONDS)))
    sys.stdout.flush()
    tensors = weights_in(torch.load(source, map_location="cpu", weights_only=True))
    # Each on its own: a tied head shares its memory with the embedding, which safetensors refuses.
    safetensors.torch.save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
