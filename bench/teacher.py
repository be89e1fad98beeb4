"""What a second model learns from a small text and from a first one, beside single models of tuned length and decay.

    python -m bench.teacher QUIJOTE [--characters 500000] [--epochs 3 6 12] [--decays 0 1] [--seeds 3] [--taught 6]

Trains on the first so many characters of a text (0: all but the last ones), measures bits per byte on 100,000 further
on. Single models: each number of epochs with each weight decay, several seeds. Taught ones: a model of the best of
these settings is the teacher of another one with `--taught` epochs and the same decay. `seconds` of a taught model are
those of both trainings; it is compared with the best single setting, of whatever length. Prints one JSON object.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import configure, report
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.data.sources import plain_text
from cuadrilla.engines.local import run_local
from cuadrilla.rundir import RunDir, read_jsonl, write_json
from cuadrilla.runfile import dump
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
epochs = {epochs}
batch_sequences = 8
unit_sequences = 8
threads = {threads}
teacher = {teacher}
[optim]
weight_decay = {decay}
[checkpoint]
every_seconds = 20
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 0
[sample]
tokens = 0
"""


class Text:
    """A small text, prepared, and the trainings on it."""

    def __init__(self, path: Path, *, characters: int, work: Path, threads: int, vocabulary: int) -> None:
        text = "".join(piece for pieces in plain_text(path).texts() for piece in pieces)
        end = characters or len(text) - HELD_OUT_CHARACTERS - BETWEEN
        held_out = text[end + BETWEEN : end + BETWEEN + HELD_OUT_CHARACTERS]
        for name, part in (("train", text[:end]), ("val", held_out or text[-len(text) // 4 :])):
            (work / f"{name}.txt").write_text(part, encoding="utf-8")
        self.work, self.threads, self.data = work, threads, work / "data"
        options = PrepareOptions(vocab=vocabulary, val=(str(work / "val.txt"),))
        self.manifest = prepare([str(work / "train.txt")], out=self.data, options=options).manifest

    def train(self, *, epochs: float, decay: float, seed: int, teacher: Path | None = None) -> dict[str, Any]:
        """Held-out bits per byte at the end, the seconds it took, and the run."""
        run = RunDir(Path(tempfile.mkdtemp(dir=self.work)))
        named = f'"{teacher}"' if teacher else "[]"
        values = {"seed": seed, "data": self.data, "epochs": epochs, "decay": decay, "threads": self.threads}
        config = configure(RUN.format(**values, teacher=named))
        write_json(run.config, {"values": dump(config)})  # where a student looks
        task = make_task(config, run.path)
        keep_teachers(config, run, task=task)
        parts = assemble(config, run, task=task, sinks=[])
        began = time.perf_counter()
        outcome = run_local(parts)
        seconds = time.perf_counter() - began
        found = float(outcome.last_row["val_bits_per_byte"])
        skipped = sum(event["event"] == "update skipped" for event in read_jsonl(run.events))
        what = f"{epochs:g} epochs, weight decay {decay:g}, seed {seed}{', taught' if teacher else ''}"
        print(f"{what}: {found:.4f} bits per byte, {seconds:.0f} s, {skipped} updates skipped", file=sys.stderr)
        return {"bits_per_byte": found, "seconds": seconds, "run": run.path}


def of(runs: list[dict[str, Any]], **setting: float) -> dict[str, Any]:
    values = [run["bits_per_byte"] for run in runs]
    seconds = statistics.median(run["seconds"] for run in runs)
    return {**setting, "bits_per_byte": statistics.mean(values), "seeds": values, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--characters", type=int, default=500_000)
    parser.add_argument("--epochs", type=float, nargs="+", default=[3, 6, 12])
    parser.add_argument("--decays", type=float, nargs="+", default=[0, 1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--taught", type=float, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Text(
            arguments.text,
            characters=arguments.characters,
            work=Path(folder),
            threads=arguments.threads,
            vocabulary=arguments.vocabulary,
        )
        singles: list[dict[str, Any]] = []
        runs_of: dict[tuple[float, float], list[dict[str, Any]]] = {}
        for epochs in arguments.epochs:
            for decay in arguments.decays:
                runs = [text.train(epochs=epochs, decay=decay, seed=seed) for seed in range(arguments.seeds)]
                runs_of[epochs, decay] = runs
                singles.append(of(runs, epochs=epochs, weight_decay=decay))
        best = min(singles, key=lambda row: float(row["bits_per_byte"]))
        taught = []
        for seed, teacher in enumerate(runs_of[best["epochs"], best["weight_decay"]]):
            run = text.train(
                epochs=arguments.taught, decay=best["weight_decay"], seed=100 + seed, teacher=teacher["run"]
            )
            taught.append({**run, "seconds": run["seconds"] + teacher["seconds"]})
        second = of(taught, epochs=arguments.taught, weight_decay=best["weight_decay"])
        report(
            "teacher",
            train_tokens=text.manifest.splits["train"].num_tokens,
            singles=singles,
            best=best,
            taught=second,
            fewer_bits=1 - second["bits_per_byte"] / best["bits_per_byte"],
        )


if __name__ == "__main__":
    main()
