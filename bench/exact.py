"""Exactness on a real GPT-2: one worker, two equal and three unequal workers, strict and not.

    python -m bench.exact [--steps 20] [--settings "adamw fp32" ...]

Trains `micro` on the built-in stories with each crew. `strict` holds one SHA-256 over weights and optimizer state per
crew (all must be equal); the others hold ‖θ_crew − θ_one‖ / ‖θ_one‖ over all parameters.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from bench.common import report
from cuadrilla.crew.run import train_run
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_file
from cuadrilla.train.checkpoint import load_newest, tensors_sha256

CREWS = {"one": [1.0], "two equal": [1.0, 1.0], "three unequal": [1.0, 0.5, 0.25]}
SETTINGS = {
    "adamw fp32": ("adamw", "fp32"),
    "muon fp32": ("muon", "fp32"),
    "adamw bf16": ("adamw", "bf16"),
    "muon bf16": ("muon", "bf16"),
}
RUN = """
[data]
folder = "{data}"
[model]
preset = "micro"
[train]
steps = {steps}
batch_sequences = 16
unit_sequences = 2
threads = 1
precision = "{precision}"
[optim]
kind = "{optimizer}"
[sync]
strict = {strict}
[checkpoint]
every_seconds = 0
journal = "off"
[evaluate]
sequences = 8
[sample]
tokens = 0
"""


def train(text: str, *sets: str) -> tuple[dict[str, Tensor], str]:
    """Final weights, and one hash over them and the optimizer's state."""
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name))
        run.run_file.write_text(text)
        train_run(read_run_file(run.run_file, sets=sets), run)
        found = load_newest(run.checkpoints)
        assert found is not None
        state = {f"optimizer.{key}": value for key, value in found.optimizer.items()}
        return found.model, tensors_sha256({**found.model, **state})


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    parts = [(a[name] - b[name]).flatten().double() for name in b]
    whole = [b[name].flatten().double() for name in b]
    return float(torch.cat(parts).norm() / torch.cat(whole).norm())


def compare(data: Path, *, steps: int, optimizer: str, precision: str) -> dict[str, object]:
    """Every crew against the single worker."""

    def run(workers: list[float], *, strict: bool) -> tuple[dict[str, Tensor], str]:
        text = RUN.format(
            data=data,
            steps=steps,
            optimizer=optimizer,
            precision=precision,
            strict=str(strict).lower(),
        )
        return train(text, *(['engine.kind="crew"', f"engine.workers={workers}"] if len(workers) > 1 else []))

    strict = {name: run(workers, strict=True)[1] for name, workers in CREWS.items()}
    loose = {name: run(workers, strict=False)[0] for name, workers in CREWS.items()}
    return {
        "strict": strict,
        "strict_equal": len(set(strict.values())) == 1,
        "relative_difference": {
            name: difference(theta, loose["one"]) for name, theta in loose.items() if name != "one"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stories", type=int, default=4000, help="to train on")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        prepare([f"cuentos:{arguments.stories}"], out=data, options=PrepareOptions(vocab=512))
        results = {
            label: compare(data, steps=arguments.steps, optimizer=optimizer, precision=precision)
            for label, (optimizer, precision) in SETTINGS.items()
            if label in arguments.settings
        }
    report("exact", steps=arguments.steps, crews=CREWS, results=results)


if __name__ == "__main__":
    main()
