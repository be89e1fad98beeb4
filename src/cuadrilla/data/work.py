"""What one process does of a preparation: clean some text, or encode some documents. Both are pure functions of their
job, and leave their result in a file; loading an encoder ahead of its first job leaves none.

    python -m cuadrilla.data.work

is such a process: it reads jobs from its standard input and answers on its standard output (`pool.py` is the other
end), and ends when its input does, so it never outlives who started it. A machine that has none of the job's files gets
their bytes and answers with those of its result (`run_apart`).
"""

import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuadrilla.data import clean, duplicates
from cuadrilla.data.chunks import Chunk, open_chunk, write_chunk
from cuadrilla.data.encode import Encoder, flat, make_encoder
from cuadrilla.data.filters import FILTERS, reason_to_drop
from cuadrilla.data.frames import receive, send
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CuadrillaError, ResourceError

SAMPLES_PER_REASON = 3
SAMPLE_CHARACTERS = 300
DROP, TRAIN, VAL = 0, 1, 2
OUT, FILES = "out", ("chunk", "tokenizer")
"""Fields of jobs that name a file: the result, and what is read."""


@dataclass(frozen=True, kw_only=True)
class CleanJob:
    """Clean some texts (or sections of texts), given as UTF-8 one after another."""

    out: str
    maximum: int
    min_characters: int
    filter: str
    near: bool
    """Compute signatures for near-duplicates."""
    keep_indentation: bool
    is_whole: list[bool]
    """For each text: it is not one section of several."""
    sizes: list[int]
    """Bytes of each text."""


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Encode the documents of a chunk. The payload: one byte for each document (DROP, TRAIN, VAL), then the hashes
    of the paragraphs to leave out of TRAIN, 8 bytes each."""

    out: str
    chunk: str
    num_documents: int
    tokenizer: str
    tokenizer_sha256: str
    encoder: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class LoadJob:
    """Load an encoder before there is text for it."""

    tokenizer: str
    tokenizer_sha256: str
    encoder: str


Job = CleanJob | EncodeJob | LoadJob


def run_job(job: Job, payload: bytes) -> None:
    match job:
        case CleanJob():
            _clean(job, payload)
        case EncodeJob():
            _encode(job, payload)
        case LoadJob():
            _encoder(job)


def texts_of(chunk: Chunk) -> Iterator[str]:
    """The documents of a cleaned chunk."""
    raw = chunk.array("text").tobytes()
    position = 0
    for size in chunk.array("sizes").tolist():
        yield raw[position : position + size].decode()
        position += size


class _Cleaned:
    """The documents of one chunk while they come in."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.of_text: list[int] = []
        self.counts: Counter[str] = Counter()
        self.dropped: list[dict[str, Any]] = []
        self._num_dropped: Counter[str] = Counter()

    def drop(self, reason: str, text: str, of_text: int) -> None:
        self.counts[reason] += 1
        if self.counts[reason] <= SAMPLES_PER_REASON:
            shown = " ".join(text[: 2 * SAMPLE_CHARACTERS].split())[:SAMPLE_CHARACTERS]
            self.dropped.append({"reason": reason, "text": of_text, "characters": len(text), "begins": shown})

    def write(self, job: CleanJob) -> None:
        paragraphs = [(number, key) for number, text in enumerate(self.texts) for key, _ in clean.long_paragraphs(text)]
        raws = [text.encode() for text in self.texts]
        sketches = duplicates.sketches(self.texts if job.near else [])
        arrays: dict[str, NDArray[Any]] = {
            "of_text": np.array(self.of_text, dtype=np.uint32),
            "hashes": np.frombuffer(b"".join(map(clean.document_hash, self.texts)), dtype=">u8").reshape(-1, 2),
            "characters": np.fromiter(map(len, self.texts), dtype=np.uint32),
            "sizes": np.fromiter(map(len, raws), dtype=np.uint32),
            "paragraph_of": np.array([number for number, _ in paragraphs], dtype=np.uint32),
            "paragraphs": np.array([key for _, key in paragraphs], dtype=np.uint64),
            "signatures": sketches.signatures,
            "samples": sketches.samples,
            "text": np.frombuffer(b"".join(raws), dtype=np.uint8),
        }
        write_chunk(Path(job.out), {"counts": self.counts, "dropped": self.dropped}, arrays)


def _clean(job: CleanJob, payload: bytes) -> None:
    cleaned = _Cleaned()
    limits = FILTERS[job.filter]
    position = 0
    for number, (size, is_whole) in enumerate(zip(job.sizes, job.is_whole, strict=True)):
        section = payload[position : position + size].decode("utf-8", "surrogatepass")
        position += size
        is_empty = True
        for text in clean.documents(
            section, keep_indentation=job.keep_indentation, counts=cleaned.counts, maximum=job.maximum
        ):
            is_empty = False
            if len(text) < job.min_characters:
                cleaned.drop("documents_too_short", text, number)
            elif reason := reason_to_drop(text, limits):
                cleaned.drop(f"filtered_{reason}", text, number)
            else:
                cleaned.texts.append(text)
                cleaned.of_text.append(number)
        cleaned.counts["texts_empty"] += is_empty and is_whole
    cleaned.write(job)


_encoders: dict[tuple[str, str], tuple[Tokenizer, Encoder]] = {}


def _encoder(job: EncodeJob | LoadJob) -> tuple[Tokenizer, Encoder]:
    """Made once for each process: loading a tokenizer takes longer than a chunk."""
    key = (job.tokenizer_sha256, job.encoder)
    found = _encoders.get(key)  # once: another thread may empty it
    if not found:
        tokenizer = Tokenizer.load(Path(job.tokenizer), sha256=job.tokenizer_sha256, known=True)
        found = (tokenizer, make_encoder(tokenizer, job.encoder))
        _encoders.clear()
        _encoders[key] = found
    return found


def _encode(job: EncodeJob, payload: bytes) -> None:
    tokenizer, encode = _encoder(job)
    splits = np.frombuffer(payload, dtype=np.uint8, count=job.num_documents)
    held_out = set(np.frombuffer(payload, dtype=np.uint64, offset=job.num_documents).tolist())
    texts, documents = [], []
    num_removed = 0
    for number, text in enumerate(texts_of(open_chunk(Path(job.chunk)))):
        kept = text
        if splits[number] == DROP:
            continue
        if splits[number] == TRAIN and held_out:
            kept, removed = clean.without_paragraphs(text, held_out)
            num_removed += removed
        if kept.strip():
            texts.append(kept)
            documents.append(number)
    ids, lengths = flat(encode(texts), dtype=job.dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    arrays: dict[str, NDArray[Any]] = {
        "documents": np.array(documents, dtype=np.uint32),
        "characters": np.fromiter(map(len, texts), dtype=np.uint32),
        "sizes": np.fromiter((len(text.encode()) for text in texts), dtype=np.uint32),
        "lengths": lengths + np.uint32(1),
        "ids": np.insert(ids, ends, tokenizer.end_of_text),
    }
    write_chunk(Path(job.out), {"removed": num_removed}, arrays)


def request(job: Job) -> dict[str, Any]:
    return {"kind": type(job).__name__, "job": asdict(job)}


def files_of(job: Job) -> dict[str, Path]:
    """What a job reads, by the name of its field."""
    return {} if isinstance(job, CleanJob) else {name: Path(getattr(job, name)) for name in FILES if hasattr(job, name)}


def run_apart(asked: dict[str, Any], payload: bytes, files: Mapping[str, bytes]) -> tuple[dict[str, Any], bytes]:
    """Run a `request` where its files are not: given are their bytes. Returns the answer, and the result."""
    try:
        with TemporaryDirectory(prefix="cuadrilla-") as folder:
            paths = {name: Path(folder) / name for name in (*files, OUT)}
            for name, raw in files.items():
                paths[name].write_bytes(raw)
            run_job(_job_of({**asked, "job": {**asked["job"], **{name: str(paths[name]) for name in paths}}}), payload)
            return {}, paths[OUT].read_bytes()
    except CuadrillaError as error:
        return _failed(error), b""
    except OSError as error:
        hint = "free some space in the folder for temporary files (TMPDIR)"
        return _failed(ResourceError("cannot write: {reason}", reason=error, hint=hint)), b""


def _job_of(asked: dict[str, Any]) -> Job:
    kinds: dict[str, type[Job]] = {"CleanJob": CleanJob, "EncodeJob": EncodeJob, "LoadJob": LoadJob}
    return kinds[asked["kind"]](**asked["job"])


def _failed(error: CuadrillaError) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us decides when we end
    with contextlib.suppress(BrokenPipeError):
        while message := receive(sys.stdin.buffer):
            header, payload = message
            try:
                run_job(_job_of(header), payload)
                answer: dict[str, Any] = {}
            except CuadrillaError as error:
                answer = _failed(error)
            send(sys.stdout.buffer, answer)
    os._exit(0)  # every answer is sent, every file whole; the interpreter would take a third of a second to end


if __name__ == "__main__":
    _main()
