"""A small text, and small models trained on it: what their settings are worth in held-out bits per byte."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.data.sources import plain_text
from cuadrilla.engines.local import run_local
from cuadrilla.rundir import RunDir, read_jsonl, write_json
from cuadrilla.runfile import dump, resolve
from cuadrilla.train.setup import assemble, make_task
from cuadrilla.train.teachers import keep_teachers

HELD_OUT_CHARACTERS, BETWEEN = 100_000, 20_000

RUN = """
[run]
seed = {seed}
[data]
folder = "{data}"
[model]
preset = "micro"
context = 128
[train]
epochs = 4
batch_sequences = 8
unit_sequences = 8
threads = {threads}
teacher = {teacher}
[optim]
weight_decay = 0
[checkpoint]
every_seconds = 20
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 0
[sample]
tokens = 0
"""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Held-out bits per byte at the end, the seconds it took, updates that the guard skipped, and the run."""

    bits_per_byte: float
    seconds: float
    skipped: int
    run: Path


class Text:
    """The first so many characters of a text (0: all but the last ones), prepared; 100,000 further on are held out."""

    def __init__(self, path: Path, *, characters: int, work: Path, threads: int, vocabulary: int) -> None:
        text = "".join(piece for pieces in plain_text(path).texts() for piece in pieces)
        end = characters or len(text) - HELD_OUT_CHARACTERS - BETWEEN
        held_out = text[end + BETWEEN : end + BETWEEN + HELD_OUT_CHARACTERS]
        for name, part in (("train", text[:end]), ("val", held_out or text[-len(text) // 4 :])):
            (work / f"{name}.txt").write_text(part, encoding="utf-8")
        self.work, self.threads, self.data = work, threads, work / "data"
        options = PrepareOptions(vocab=vocabulary, val=(str(work / "val.txt"),))
        self.manifest = prepare([str(work / "train.txt")], out=self.data, options=options).manifest

    @property
    def num_tokens(self) -> int:
        return self.manifest.splits["train"].num_tokens

    def train(self, *, sets: Sequence[str], seed: int, teacher: Path | None = None) -> Trained:
        """Train a model with these settings (`section.key=value`), and say on stderr how it went."""
        run = RunDir(Path(tempfile.mkdtemp(dir=self.work)))
        named = f'"{teacher}"' if teacher else "[]"
        file = RUN.format(seed=seed, data=self.data, threads=self.threads, teacher=named)
        config = resolve(file, sets=list(sets)).config
        write_json(run.config, {"values": dump(config)})  # where a student looks
        task = make_task(config, run.path)
        keep_teachers(config, run, task=task)
        parts = assemble(config, run, task=task, sinks=[])
        began = time.perf_counter()
        outcome = run_local(parts)
        trained = Trained(
            bits_per_byte=float(outcome.last_row["val_bits_per_byte"]),
            seconds=time.perf_counter() - began,
            skipped=sum(event["event"] == "update skipped" for event in read_jsonl(run.events)),
            run=run.path,
        )
        found = f"{trained.bits_per_byte:.4f} bits per byte, {trained.seconds:.0f} s, {trained.skipped} updates skipped"
        what = f"{' '.join(sets)}, seed {seed}{', taught' if teacher else ''}"
        print(f"{what}: {found}", file=sys.stderr, flush=True)
        return trained
