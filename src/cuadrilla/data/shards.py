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
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import fsync_folder, read_regular, storage_errors, write_atomic

SCHEMA = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")
SHARD_TOKENS = 2**24

Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Option = str | int | float


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of tokens. The name is checked because a manifest may come from another machine."""

    name: Annotated[str, Field(pattern=r"^(train|val)-\d{5}\.bin$")]
    num_tokens: Annotated[int, Field(ge=1, lt=2**63)]
    sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class Split:
    """One half of the corpus. `num_bytes`: UTF-8 bytes of the text that the tokens encode, end-of-text excluded."""

    num_tokens: Count
    num_bytes: Count
    num_documents: Count
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What one source gave to one split."""

    num_documents: Count
    num_characters: Count
    num_bytes: Count
    num_tokens: Count


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a part of the text came from. `num_bytes` and `sha256` are those of the file as it was read."""

    name: str
    sha256: Sha256
    num_bytes: Count
    encoding: str
    licence: str
    num_documents: Count
    portions: dict[str, Portion] = field(default_factory=dict)
    """By split."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a data folder that another machine must agree on."""

    tokenizer_sha256: Sha256
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    dtype: Literal["uint16", "uint32"]
    end_of_text: Count
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


@cache
def _validator() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Accept the folder: write this after everything it names."""
    value = {"schema": SCHEMA, **asdict(manifest)}
    write_atomic(folder / MANIFEST, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a data folder. Raises DataError if it is missing, newer than this program, or broken."""
    path = folder / MANIFEST
    hint = Message("prepare it with `cuadrilla data prepare SOURCES --out {folder}`", folder=folder)
    try:
        value = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        is_there = folder.exists()
        missing = "{folder} is not a finished data folder: it has no {file}" if is_there else "{folder} does not exist"
        raise DataError(missing, folder=folder, file=MANIFEST, hint=hint) from None
    except OSError as error:
        raise DataError("cannot read {path}: {reason}", path=path, reason=error.strerror or error, hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise DataError("{path} is not JSON: {error}", path=path, error=error, hint=hint) from error
    schema = value.pop("schema", None) if isinstance(value, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise DataError(
            "{path} has schema {schema}; this version reads schemas up to {newest}",
            path=path,
            schema=schema,
            newest=SCHEMA,
            hint="install a newer cuadrilla",
        )
    if schema != SCHEMA:
        raise DataError("{path} is not a manifest of cuadrilla", path=path, hint=hint)
    return _checked(value, path=path, hint=hint)


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


def _checked(value: dict[str, Any], *, path: Path, hint: str) -> Manifest:
    try:
        manifest = _validator().validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            "{path} is broken at {where}: {reason}", path=path, where=where, reason=first["msg"], hint=hint
        ) from error
    for name, split in manifest.splits.items():
        total = sum(shard.num_tokens for shard in split.shards)
        wrong = [shard.name for shard in split.shards if not shard.name.startswith(f"{name}-")]
        if total != split.num_tokens or wrong:
            about = wrong[0] if wrong else name
            raise DataError("{path} contradicts itself about {about}", path=path, about=about, hint=hint)
    return manifest


def verify_shard(folder: Path, shard: Shard, *, dtype: str, hashes: bool) -> None:
    """Raises DataError that names the file if it is missing, has another length or (with `hashes`) other bytes."""
    path = folder / shard.name
    hint = Message("copy {name} again from a machine that has it, or prepare the folder again", name=shard.name)
    expected = shard.num_tokens * np.dtype(dtype).itemsize
    try:
        found = path.stat().st_size
        if found != expected:
            raise DataError(
                "{path} has {found:,} bytes, but the manifest says {expected:,}",
                path=path,
                found=found,
                expected=expected,
                hint=hint,
            )
        if hashes:
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != shard.sha256:
                raise DataError(
                    "{path} has changed: hash {found}, expected {expected}",
                    path=path,
                    found=sha256[:12],
                    expected=shard.sha256[:12],
                    hint=hint,
                )
    except OSError as error:
        raise DataError("cannot read {path}: {reason}", path=path, reason=error.strerror or error, hint=hint) from error


def verify_folder(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """`verify_shard` for every shard, and the tokenizer's hash. Raises DataError that names the file at fault."""
    path = folder / TOKENIZER
    try:
        found = hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise DataError(
            "cannot read {path}: {reason}", path=path, reason=error.strerror or error, hint="prepare the folder again"
        ) from error
    if found != manifest.tokenizer_sha256:
        raise DataError(
            "{path} has hash {found}, but the manifest names {expected}",
            path=path,
            found=found[:12],
            expected=manifest.tokenizer_sha256[:12],
            hint="put the right tokenizer.json back, or prepare the folder again",
        )
    for split in manifest.splits.values():
        for shard in split.shards:
            verify_shard(folder, shard, dtype=manifest.dtype, hashes=hashes)


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
        tokens = np.asarray(ids) if len(ids) else np.empty(0, dtype=self._dtype)
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
    def open(cls, folder: Path, split: str, *, verify: bool = False) -> Self:
        """Lengths are always checked, hashes with `verify`. Raises DataError that names the file at fault."""
        manifest = read_manifest(folder)
        named = manifest.splits.get(split)
        if named is None or not named.shards:
            raise DataError(
                "{folder} has no {split} text",
                folder=folder,
                split=split,
                hint="prepare it again with another --val-fraction",
            )
        arrays = []
        for shard in named.shards:
            verify_shard(folder, shard, dtype=manifest.dtype, hashes=verify)
            dtype = np.dtype(manifest.dtype).newbyteorder("<")
            arrays.append(np.memmap(folder / shard.name, dtype=dtype, mode="r"))
        return cls(arrays)

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

    def gather(self, starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """`read(start, count)` of each start, as rows: shape (len(starts), count)."""
        rows = np.empty((len(starts), count), dtype=np.int64)
        for row, start in zip(rows, starts.tolist(), strict=True):
            row[:] = self.read(start, count)
        return rows


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
