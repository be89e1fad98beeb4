"""What stands beside the curves of a run: its settings, its data, the size of its model, its coordinator's software."""

import contextlib
import json
import math
from typing import Any

from cuadrilla.rundir import RunDir, read_object
from cuadrilla.runfile import leaves


def about(run: RunDir) -> dict[str, Any]:
    """As plain data. `changed`: keys of `values` that were set by the run file or on the command line."""
    config = read_object(run.config)
    values = {key: value for key, value in leaves(config.get("values", {})).items() if not key.startswith("alarm.")}
    origins = config.get("origins", {})
    folder = values.get("data.folder")
    manifest = read_object(run.path / folder / "manifest.json") if folder else {}  # if it is on this machine
    return {
        "parameters": _num_parameters(run),
        "values": values,
        "changed": [key for key in values if origins.get(key, "default") != "default"],
        "environment": read_object(run.env),
        "data": {
            "vocabulary": manifest.get("vocab_size", 0),
            "sources": manifest.get("sources", []),
            "splits": manifest.get("splits", {}),
        },
    }


def _num_parameters(run: RunDir) -> int | None:
    """From the header of the newest checkpoint's weights: 8 bytes of length, then JSON (the safetensors format)."""
    for path in sorted(run.checkpoints.glob("v*/model.safetensors"), reverse=True):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # it may have been replaced by a newer one
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return int(sum(math.prod(header[name]["shape"]) for name in header if name != "__metadata__"))
    return None
