"""The one place where a pickle is opened: a child process that reads a torch file and leaves safetensors behind.

    python -m cuadrilla.model.unpickle SOURCE TARGET

torch's restricted reader (`weights_only=True`) builds tensors and plain values only, and refuses every other name.
Behind it, in case it has a hole: the process has next to no environment; on Linux it may open no socket and start no
program from the moment it reads (seccomp); memory, processor time and the size of what it writes are limited. It says
on stdout, before it reads, what it could not give up.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cuadrilla.errors import CheckpointError, ResourceError
from cuadrilla.host.confine import cut_off, limit_resources

TIMEOUT_SECONDS = 900.0
MAX_REASON = 300
MEMORY_PER_BYTE = 4
SPARE_BYTES = 2**30
INHERITED = ("PATH", "PYTHONPATH", "SYSTEMROOT", "TMPDIR", "TEMP", "VIRTUAL_ENV")
NESTED = ("state_dict", "model_state_dict", "model")
"""Where training programs put the weights beside other things."""


def read_pickled(source: Path, target: Path, *, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Turn a torch file into safetensors, in a child. Returns what the child could not be kept from, "" if nothing.

    Raises CheckpointError with the child's reason, ResourceError when there is no room for the result.
    """
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    command = [sys.executable, "-m", __name__, str(source.resolve()), str(target.resolve())]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=complained, env=environment, cwd=target.parent
        )
        try:
            child.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"{source} was not read within {timeout_seconds:.0f} s", hint="copy the original again"
            ) from None
        finally:
            child.kill()
            child.wait()
        said.seek(0)
        complained.seek(0)
        notes, complaint = said.read(10_000).decode(errors="replace"), complained.read(10**6).decode(errors="replace")
    if child.returncode:
        if "No space left" in complaint:
            raise ResourceError(f"no room to write {target}", hint="free some space or choose another disk")
        raise CheckpointError(
            f"{source} cannot be read: {_reason(complaint, child.returncode)}",
            hint="only tensors and plain values are read; ask its maker for safetensors",
        )
    return notes.strip()


def _reason(complaint: str, code: int) -> str:
    if code < 0:
        return f"its reader was ended by signal {-code}"
    lines = [line.strip()[:MAX_REASON] for line in complaint.splitlines() if line.strip()]
    refused = [line for line in lines if re.search("unsupported", line, re.IGNORECASE)]
    return (refused or lines[-1:] or [f"exit code {code}"])[0]


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
    notes = [limit_resources(num_bytes, cpu_seconds=int(TIMEOUT_SECONDS)), cut_off()]
    sys.stdout.write("; ".join(filter(None, notes)))
    sys.stdout.flush()
    tensors = weights_in(torch.load(source, map_location="cpu", weights_only=True))
    # Each on its own: a tied head shares its memory with the embedding, which safetensors refuses.
    safetensors.torch.save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
