"""A small text, and small models trained on it: what their settings are worth in held-out bits per byte."""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.crew.local import run_local
from cuadrilla.data.formats.encoding import read_text
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.data.shards import MANIFEST, read_manifest
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import RunDir, read_jsonl, write_json
from cuadrilla.runfile import dump, resolve
from cuadrilla.train.setup import assemble, make_task
from cuadrilla.train.teachers import keep_teachers

HELD_OUT_CHARACTERS, BETWEEN = 100_000, 20_000
ENDED = "ended.json"  # of a training

RUN = """
[run]
seed = {seed}
[data]
folder = "{data}"
[model]
preset = "micro"
[train]
threads = {threads}
teacher = {teacher}
[checkpoint]
every_seconds = 20
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 0
[sample]
tokens = 0
"""
SETTLED = (
    "model.context=128",
    "train.epochs=4",
    "train.batch_sequences=8",
    "train.unit_sequences=8",
    "optim.weight_decay=0",
)
"""What the run file leaves open, where settings are compared."""


@dataclass(frozen=True)
class Trained:
    """Held-out bits per byte at the end, the seconds it took, updates that the guard skipped, and the run."""

    bits_per_byte: float
    seconds: float
    skipped: int
    run: Path


class Text:
    """The first so many characters of a text (0: all but the last ones), prepared; 100,000 further on are held out.

    What `work` holds already, of this text or of a training that ended, is not made again.
    """

    def __init__(self, path: Path, *, characters: int, work: Path, threads: int, vocabulary: int) -> None:
        text = read_text(path)
        end = characters or len(text) - HELD_OUT_CHARACTERS - BETWEEN
        held_out = text[end + BETWEEN : end + BETWEEN + HELD_OUT_CHARACTERS]
        self.work, self.threads = work / f"{path.stem}-{characters}-{vocabulary}", threads
        self.data = self.work / "data"
        if not (self.data / MANIFEST).exists():
            self.work.mkdir(parents=True, exist_ok=True)
            for name, part in (("train", text[:end]), ("val", held_out or text[-len(text) // 4 :])):
                (self.work / f"{name}.txt").write_text(part, encoding="utf-8")
            options = PrepareOptions(vocab=vocabulary, val=(str(self.work / "val.txt"),))
            prepare([str(self.work / "train.txt")], out=self.data, options=options)
        self.manifest = read_manifest(self.data)

    @property
    def num_tokens(self) -> int:
        return self.manifest.splits["train"].num_tokens

    def train(
        self, *, sets: Sequence[str], seed: int, teacher: Path | None = None, settled: Sequence[str] = SETTLED
    ) -> Trained:
        """Train a model with these settings (`section.key=value`) over `settled`, and say on stderr how it went."""
        what = f"{' '.join(sets)}, seed {seed}{f', taught by {teacher.name}' if teacher else ''}"
        what += "" if settled == SETTLED else f", instead of the usual: {' '.join(settled) or 'nothing'}"
        run = RunDir(self.work / hashlib.sha256(what.encode()).hexdigest()[:12])
        ended = run.path / ENDED
        if not ended.exists():
            shutil.rmtree(run.path, ignore_errors=True)
            run.path.mkdir()
            ended.write_text(
                json.dumps({"what": what, **self._train(run, [*settled, *sets], seed, teacher)}), encoding="utf-8"
            )
        found = json.loads(ended.read_text(encoding="utf-8"))
        trained = Trained(found["bits_per_byte"], seconds=found["seconds"], skipped=found["skipped"], run=run.path)
        told = f"{trained.bits_per_byte:.4f} bits per byte, {trained.seconds:.0f} s, {trained.skipped} updates skipped"
        print(f"{what}: {told}", file=sys.stderr, flush=True)
        return trained

    def _train(self, run: RunDir, sets: Sequence[str], seed: int, teacher: Path | None) -> dict[str, float]:
        named = f'"{teacher}"' if teacher else "[]"
        file = RUN.format(seed=seed, data=self.data, threads=self.threads, teacher=named)
        config, _ = decide(resolve(file, sets=list(sets)).config, run)
        write_json(run.config, {"values": dump(config)})  # where a student looks
        task = make_task(config, run.path)
        keep_teachers(config, run, task=task)
        context = assemble(config, run, task=task, sinks=[])
        began = time.perf_counter()
        outcome = run_local(context)
        return {
            "bits_per_byte": float(outcome.last_row["val_bits_per_byte"]),
            "seconds": time.perf_counter() - began,
            "skipped": sum(event["event"] == "update skipped" for event in read_jsonl(run.events)),
        }


def options(about: str) -> argparse.ArgumentParser:
    """The options of a bench over a small text."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--characters", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--work", type=Path, help="a folder that keeps data and trainings, to go on from")
    return parser


@contextmanager
def text_of(arguments: argparse.Namespace) -> Iterator[Text]:
    """The text that the options name, in a folder that goes at the end unless `--work` keeps it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Text(
            arguments.text,
            characters=arguments.characters,
            work=arguments.work or Path(folder),
            threads=arguments.threads,
            vocabulary=arguments.vocabulary,
        )
