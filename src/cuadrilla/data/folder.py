"""A data folder: the tokens of a corpus and their manifest.

It holds `manifest.json`, `tokenizer.json`, `train.bin` and `val.bin`: little-endian uint16 (uint32 when the vocabulary
has more than 65,536 tokens), each document followed by one end-of-text token.

Invariants
* `manifest.json` is written last. A folder without one counts as empty, whatever else lies in it.
* A token file's length follows from the manifest and is checked whenever it is opened, its SHA-256 by a machine that
  fetches it.
* `Manifest.hash()` depends only on content (no path, time or host): folders with the same hash are interchangeable.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import file_sha256, fsync_folder, storage_errors, write_atomic

SCHEMA = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TOKENS = {"train": "train.bin", "val": "val.bin"}
"""The file of each split."""

Option = str | int | float


@dataclass(frozen=True, kw_only=True)
class Split:
    """One of the two splits. `num_bytes`: UTF-8 bytes of the text that its tokens encode, without end-of-text."""

    num_tokens: int
    num_bytes: int
    num_documents: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of the text. `num_bytes` is the size of its text, unpacked; `sha256` is the hash of the file itself."""

    name: str
    sha256: str
    num_bytes: int
    encoding: str
    licence: str
    documents: dict[str, int] = field(default_factory=dict)
    """Number of its documents in each split."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All facts about a data folder in which two machines must agree."""

    tokenizer_sha256: str
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    end_of_text: int
    splits: dict[str, Split]
    sources: tuple[Source, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    """Number of repairs and of dropped documents, by kind."""
    options: dict[str, Option] = field(default_factory=dict)
    """The options of `data prepare` that decide the content."""

    @property
    def num_held_out(self) -> int:
        """Number of tokens in the split `val`."""
        return self.splits["val"].num_tokens if "val" in self.splits else 0

    def hash(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(f"{SCHEMA} {text}".encode()).hexdigest()

    def files(self) -> dict[str, str]:
        """Name and SHA-256 of every other file of the folder."""
        tokens = {TOKENS[split]: self.splits[split].sha256 for split in TOKENS if split in self.splits}
        return {TOKENIZER: self.tokenizer_sha256, **tokens}


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the folder valid. All files that it names must be written before."""
    value = {"schema": SCHEMA, **asdict(manifest)}
    write_atomic(folder / MANIFEST, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a data folder. Raises DataError if it is missing, broken, or of another version."""
    path = folder / MANIFEST
    hint = Message("prepare it with `cuadrilla data prepare SOURCES --out {folder}`", folder=folder)
    try:
        value = json.loads(path.read_bytes())
        if value.pop("schema") != SCHEMA:
            raise ValueError("it is of another version of cuadrilla")
        return TypeAdapter(Manifest).validate_python(value)
    except (FileNotFoundError, NotADirectoryError):
        is_there = folder.exists()
        missing = "{folder} is not a finished data folder: it has no {file}" if is_there else "{folder} does not exist"
        raise DataError(missing, folder=folder, file=MANIFEST, hint=hint) from None
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise DataError("{path} cannot be read: {error}", path=path, error=error, hint=hint) from error


def data_files(folder: Path) -> list[tuple[Path, str]]:
    """Every file of a data folder with its SHA-256, so that another machine can copy the folder. Raises DataError."""
    files = [(folder / name, sha256) for name, sha256 in read_manifest(folder).files().items()]
    return [*files, (folder / MANIFEST, file_sha256(folder / MANIFEST))]  # last: it makes the folder valid


def verify_folder(folder: Path, manifest: Manifest) -> None:
    """Raises a DataError that names the file, if the tokenizer has changed, or a token file has the wrong length."""
    _verify(folder / TOKENIZER, sha256=manifest.tokenizer_sha256)
    for split in manifest.splits.keys() & TOKENS.keys():
        made = manifest.splits[split]
        _verify(folder / TOKENS[split], num_bytes=made.num_tokens * np.dtype(manifest.dtype).itemsize)


def _verify(path: Path, *, num_bytes: int | None = None, sha256: str = "") -> None:
    hint = "copy it again from a machine that has it, or prepare the folder again"
    try:
        is_whole = num_bytes in (None, path.stat().st_size) and (not sha256 or file_sha256(path) == sha256)
    except OSError as error:
        reason = error.strerror or error
        raise DataError("cannot read {path}: {reason}", path=path, reason=reason, hint=hint) from error
    if not is_whole:
        raise DataError("{path} is not what the manifest says: it was changed or damaged", path=path, hint=hint)


def open_tokens(folder: Path, split: str) -> NDArray[Any]:
    """The tokens of a split, memory-mapped. Raises a DataError that names the file at fault."""
    manifest = read_manifest(folder)
    named = manifest.splits.get(split)
    if named is None or not named.num_tokens:
        hint = "prepare it again with more text"
        raise DataError("{folder} has no {split} text", folder=folder, split=split, hint=hint)
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    _verify(folder / TOKENS[split], num_bytes=named.num_tokens * dtype.itemsize)
    return np.memmap(folder / TOKENS[split], dtype=dtype, mode="r")


def publish(work: Path, folder: Path, manifest: Manifest) -> None:
    """Move a finished tokenizer and token files from `work` into `folder`, replace the old ones, write the manifest.

    After the old manifest is removed, and until the new one is written, the folder counts as unfinished.
    """
    with storage_errors(folder):
        (folder / MANIFEST).unlink(missing_ok=True)
        fsync_folder(folder)
        for name in manifest.files():
            os.replace(work / name, folder / name)
        fsync_folder(folder)
    write_manifest(folder, manifest)
