"""Files of weights as Hugging Face's layout has them: one of safetensors, or several parts with an index.

    model.safetensors        model-00001-of-00002.safetensors ...  model.safetensors.index.json

The index says for each tensor in which part it is. It is believed in nothing: a part is a file of its folder and has a
plain name, and parts hold exactly the tensors that the index says. Nothing is ever unpickled; files, headers and the
index are measured before they are opened or parsed.
"""

import json
import re
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from cuadrilla.errors import CheckpointError
from cuadrilla.host.facts import read_facts
from cuadrilla.messages import Message

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 2**23  # a hundred times that of the largest GPT-2
PICKLE_HINT = "convert it where you trust it: load it with transformers and call save_pretrained()"

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.safetensors")
_AGAIN = "copy the original again"


def weights_of(folder: Path) -> Path:
    """The file to read a folder's weights from: `WEIGHTS` (there or not), or the `INDEX` of its parts."""
    is_whole = (folder / WEIGHTS).exists() or not (folder / INDEX).exists()
    return folder / (WEIGHTS if is_whole else INDEX)


def require_weights(*files: Path) -> None:
    """Raises CheckpointError, before they are opened, for what is not there, and for more than memory can hold."""
    try:
        num_bytes = sum(path.stat().st_size for path in files)
    except OSError as error:
        raise CheckpointError(
            "cannot read {path}: {reason}", path=error.filename, reason=error.strerror or error, hint=_AGAIN
        ) from error
    memory_bytes = read_facts().memory_bytes
    if num_bytes > memory_bytes:
        raise CheckpointError(
            "{folder} has {weights:,.1f} GiB of weights, this machine a memory of {memory:,.1f} GiB",
            folder=files[0].parent,
            weights=num_bytes / 2**30,
            memory=memory_bytes / 2**30,
            hint="it is read into memory as a whole: use a machine with more memory, or a smaller model",
        )


def files_of(path: Path) -> list[Path]:
    """What holds the tensors: the file itself, or the parts of an index by name. Raises CheckpointError."""
    return [path] if path.name != INDEX else [path.with_name(name) for name in sorted(_read_index(path))]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of the parts of an index, as they are stored. Raises CheckpointError."""
    if path.name != INDEX:
        return _read_file(path)
    tensors: dict[str, Tensor] = {}
    parts = _read_index(path)
    require_weights(*map(path.with_name, parts))
    for name, expected in parts.items():
        found = _read_file(path.with_name(name))
        if odd := sorted(found.keys() ^ expected):
            raise CheckpointError(
                "{path} lacks {tensor}, but {index} says otherwise"
                if odd[0] in expected
                else "{path} has {tensor}, but {index} says otherwise",
                path=path.with_name(name),
                tensor=odd[0],
                index=path.name,
                hint=_AGAIN,
            )
        tensors |= found
    return tensors


def _read_index(path: Path) -> dict[str, set[str]]:
    """The tensors of each part. Raises CheckpointError; also if a part is not there."""
    try:
        content: Any = json.loads(path.read_bytes())
        found = content["weight_map"]
        if not isinstance(found, dict) or not found:
            raise CheckpointError("{path} is not an index of safetensors: it names no tensors", path=path, hint=_AGAIN)
    except OSError as error:
        raise CheckpointError(
            "cannot read {path}: {reason}", path=path, reason=error.strerror or error, hint=_AGAIN
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "{path} is not an index of safetensors: {reason}", path=path, reason=error, hint=_AGAIN
        ) from error
    parts: dict[str, set[str]] = {}
    for tensor, name in found.items():
        if not isinstance(name, str) or not _PART.fullmatch(name):
            raise CheckpointError(
                "{path} names a part {part}, which is not a file in its folder",
                path=path,
                part=f"{name!r:.100}",
                hint=_AGAIN,
            )
        parts.setdefault(name, set()).add(tensor)
    missing = [name for name in sorted(parts) if not path.with_name(name).is_file()]
    if missing:
        raise CheckpointError(
            "{folder} lacks {names}: {missing} of the {parts} files that hold its weights",
            folder=path.parent,
            names=", ".join(missing[:4]) + (" ..." if len(missing) > 4 else ""),
            missing=len(missing),
            parts=len(parts),
            hint="fetch the missing files from where the model came from",
        )
    return parts


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        if path.with_name("pytorch_model.bin").exists():
            raise CheckpointError(
                "{folder} holds only pytorch_model.bin, a pickle", folder=path.parent, hint=PICKLE_HINT
            )
        hint = "name a folder with config.json and model.safetensors"
        raise CheckpointError("{path} does not exist", path=path, hint=hint)
    require_weights(path)
    try:
        _check_header(path)
        with safetensors.safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is not a dict
    except safetensors.SafetensorError as error:
        with open(path, "rb") as file:
            start = file.read(2)
        pickled = start == b"PK" or (start[:1] == b"\x80" and start[1:] in (b"\2", b"\3", b"\4", b"\5"))
        raise CheckpointError(
            "{path} is a pickle ({reason})" if pickled else "{path} is not a complete safetensors file ({reason})",
            path=path,
            reason=error.args[0],
            hint=PICKLE_HINT if pickled else _AGAIN,
        ) from error
    except OSError as error:
        raise CheckpointError(
            "cannot read {path}: {reason}", path=path, reason=error.strerror or error, hint=_AGAIN
        ) from error


def _check_header(path: Path) -> None:
    """Raises SafetensorError before the library parses a header (JSON) so large that parsing takes all memory."""
    with open(path, "rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
    if num_bytes > MAX_HEADER_BYTES:
        raise safetensors.SafetensorError(Message("its header would have {bytes:,} bytes", bytes=num_bytes))
