"""Token shards and their manifest: the durable form of a corpus.

A data folder holds `manifest.json`, `tokenizer.json`, `train-00000.bin`..., `val-00000.bin`...: little-endian uint16
(uint32 when the vocabulary has more than 65,536 tokens), each document followed by one end-of-text token.

Invariants
* `manifest.json` is written last: a folder without one holds nothing, whatever else lies in it.
* A shard has its final name only when it is whole and on disk. Its length follows from the manifest and is checked
  whenever it is opened; its sha256 on request.
* `Manifest.hash()` depends on content only (no path, time or host): folders with the same hash are interchangeable.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import file_sha256, fsync_folder, storage_errors, write_atomic

SCHEMA = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")
SHARD_TOKENS = 2**24

Option = str | int | float


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of tokens."""

    name: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """One half of the corpus. `num_bytes`: UTF-8 bytes of the text that the tokens encode, end-of-text excluded."""

    num_tokens: int
    num_bytes: int
    num_documents: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What one source gave to one split."""

    num_documents: int
    num_characters: int
    num_bytes: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a part of the text came from. `num_bytes` and `sha256` are those of the file as it was read."""

    name: str
    sha256: str
    num_bytes: int
    encoding: str
    licence: str
    portions: dict[str, Portion] = field(default_factory=dict)
    """By split."""

    @property
    def num_documents(self) -> int:
        return sum(portion.num_documents for portion in self.portions.values())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a data folder that another machine must agree on."""

    tokenizer_sha256: str
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    end_of_text: int
    splits: dict[str, Split]
    sources: tuple[Source, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    """What was repaired or dropped, and how often."""
    options: dict[str, Option] = field(default_factory=dict)
    """What was asked of `data prepare`."""

    def hash(self) -> str:
        """sha256 of the canonical JSON."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(f"{SCHEMA} {text}".encode()).hexdigest()


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Accept the folder: write this after everything it names."""
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


def data_files(folder: Path) -> list[tuple[Path, bytes]]:
    """Every file of a data folder and its SHA-256: what another machine needs to have the same. Raises DataError."""
    manifest = read_manifest(folder)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    own = hashlib.sha256((folder / MANIFEST).read_bytes()).digest()
    return [
        (folder / TOKENIZER, bytes.fromhex(manifest.tokenizer_sha256)),
        *((folder / shard.name, bytes.fromhex(shard.sha256)) for shard in shards),
        (folder / MANIFEST, own),  # last: a folder without one holds nothing
    ]


def verify_folder(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Raises DataError that names the tokenizer or a shard if it is missing, cut, or (with `hashes`) has changed."""
    _verify(folder / TOKENIZER, sha256=manifest.tokenizer_sha256)
    width = np.dtype(manifest.dtype).itemsize
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        _verify(folder / shard.name, num_bytes=shard.num_tokens * width, sha256=shard.sha256 if hashes else "")


def _verify(path: Path, *, num_bytes: int | None = None, sha256: str = "") -> None:
    hint = "copy it again from a machine that has it, or prepare the folder again"
    try:
        is_whole = num_bytes in (None, path.stat().st_size) and (not sha256 or file_sha256(path) == sha256)
    except OSError as error:
        reason = error.strerror or error
        raise DataError("cannot read {path}: {reason}", path=path, reason=reason, hint=hint) from error
    if not is_whole:
        raise DataError("{path} is not what the manifest says: it was changed or damaged", path=path, hint=hint)


class ShardWriter:
    """Writes the shards of one split: `append` token ids, then `close`. Leaving by an exception leaves no file open.

    Raises ResourceError when the disk is full.
    """

    def __init__(self, folder: Path, *, split: str, dtype: str, shard_tokens: int = SHARD_TOKENS) -> None:
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._buffer = np.empty(shard_tokens, dtype=self._dtype)
        self._num_pending = 0

    @property
    def num_tokens(self) -> int:
        return self._num_pending + sum(shard.num_tokens for shard in self._shards)

    def append(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Add token ids; they must fit the dtype."""
        tokens = np.asarray(ids)
        assert not len(tokens) or (tokens.min() >= 0 and tokens.max() <= np.iinfo(self._dtype).max)
        while len(tokens):
            taken = tokens[: self._shard_tokens - self._num_pending]
            self._buffer[self._num_pending : self._num_pending + len(taken)] = taken
            self._num_pending += len(taken)
            tokens = tokens[len(taken) :]
            if self._num_pending == self._shard_tokens:
                self._flush()

    def close(self) -> tuple[Shard, ...]:
        """Write what is left; the shards in order."""
        if self._num_pending:
            self._flush()
        return tuple(self._shards)

    def _flush(self) -> None:
        name = f"{self._split}-{len(self._shards):05d}.bin"
        raw = self._buffer[: self._num_pending].tobytes()
        write_atomic(self._folder / name, raw)
        self._shards.append(Shard(name=name, num_tokens=self._num_pending, sha256=hashlib.sha256(raw).hexdigest()))
        self._num_pending = 0


class TokenStream:
    """All shards of one split as one sequence of tokens, memory-mapped."""

    def __init__(self, shards: Sequence[NDArray[Any]]) -> None:
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)

    @classmethod
    def open(cls, folder: Path, split: str) -> Self:
        """Lengths are checked. Raises DataError that names the file at fault."""
        manifest = read_manifest(folder)
        named = manifest.splits.get(split)
        if named is None or not named.shards:
            raise DataError(
                "{folder} has no {split} text",
                folder=folder,
                split=split,
                hint="prepare it again with more text",
            )
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        for shard in named.shards:
            _verify(folder / shard.name, num_bytes=shard.num_tokens * dtype.itemsize)
        return cls([np.memmap(folder / shard.name, dtype=dtype, mode="r") for shard in named.shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens start..start+count, across shards. Raises IndexError outside of the stream."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start}..{start + count} of {len(self)}")
        tokens = np.empty(count, dtype=np.int64)
        number = int(np.searchsorted(self._ends, start, side="right"))
        done = 0
        while done < count:
            shard = self._shards[number]
            offset = start + done - (int(self._ends[number]) - len(shard))
            part = shard[offset : offset + count - done]
            tokens[done : done + len(part)] = part
            done += len(part)
            number += 1
        return tokens


def publish(work: Path, folder: Path, manifest: Manifest) -> None:
    """Move finished shards and tokenizer from `work` into `folder`, replacing what it held, and accept them.

    From the moment the old manifest is gone until the new one is there, the folder counts as unfinished.
    """
    with storage_errors(folder):
        (folder / MANIFEST).unlink(missing_ok=True)
        fsync_folder(folder)
        shards = [f"{split}-[0-9][0-9][0-9][0-9][0-9].bin" for split in SPLITS]
        for pattern in (*shards, f".{MANIFEST}.*.tmp"):
            for old in folder.glob(pattern):
                old.unlink()
        for name in (TOKENIZER, *(shard.name for split in manifest.splits.values() for shard in split.shards)):
            os.replace(work / name, folder / name)
        fsync_folder(folder)
    write_manifest(folder, manifest)
