"""What stands beside the curves of a run: its settings, its data, the size of its model, its coordinator's software.

The files may come from elsewhere: what has another shape than ours is left out.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuadrilla.rundir import RunDir, finite_json, read_regular, require_regular

MAX_SOURCES = 200
MAX_HEADER_BYTES = 10**7
CHECKED, OVERLAPPING = "val_windows_checked", "val_windows_in_train"  # counts of a manifest


def about(run: RunDir) -> dict[str, Any]:
    """As plain data. `changed`: keys of `values` that were set by the run file or on the command line."""
    config = object_of(run.config)
    values = {key: value for key, value in _flat(part_of(config, "values")).items() if not key.startswith("alarm.")}
    origins = part_of(config, "origins")
    environment = object_of(run.env)
    return {
        "parameters": _num_parameters(run),
        "values": values,
        "changed": [key for key in values if origins.get(key, "default") != "default"],
        "environment": environment | {"packages": part_of(environment, "packages")},
        "data": _data(run, values),
    }


def _data(run: RunDir, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the data folder's manifest says, if it is on this machine."""
    folder = values.get("data.folder")
    manifest = object_of(run.path / str(folder) / "manifest.json") if folder else {}
    sources, splits = manifest.get("sources"), part_of(manifest, "splits")
    checked, overlapping = (_number(part_of(manifest, "counts"), name) for name in (CHECKED, OVERLAPPING))
    return {
        "vocabulary": _number(manifest, "vocab_size"),
        "leak": overlapping / checked if checked else 0.0,
        "sources": [
            {"name": source.get("name"), "licence": source.get("licence"), "num_bytes": _number(source, "num_bytes")}
            for source in (sources if isinstance(sources, list) else ())[:MAX_SOURCES]
            if isinstance(source, dict)
        ],
        "splits": {
            name: {key: _number(part_of(splits, name), key) for key in ("num_documents", "num_bytes", "num_tokens")}
            for name in splits
        },
    }


def _num_parameters(run: RunDir) -> int | None:
    """From the header of the newest checkpoint's weights: 8 bytes of length, then JSON (the safetensors format)."""
    for path in sorted(run.checkpoints.glob("v*/model.safetensors"), reverse=True):
        try:
            require_regular(path)
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = finite_json(file.read(min(size, MAX_HEADER_BYTES)))
            return int(sum(math.prod(header[name]["shape"]) for name in header if name != "__metadata__"))
        except (OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            continue
    return None


def object_of(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none that can be read."""
    try:
        return part_of({"": finite_json(read_regular(path))}, "")
    except (OSError, ValueError, RecursionError):
        return {}


def part_of(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _number(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    return value if type(value) is int and 0 <= value < 2**53 else 0


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
