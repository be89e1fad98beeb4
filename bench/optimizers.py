"""Muon against fairly tuned AdamW: how many tokens each needs for the same held-out loss.

    python -m bench.optimizers DATA_FOLDER [--tokens 1500000] [--seeds 3]

AdamW trains for the whole budget, with its own schedule, at three learning rates and several seeds; the target is the
mean held-out loss of its best rate. Muon trains at three learning rates and the same seeds with shorter budgets, each
with a schedule of its own length. `tokens_ratio` is the budget, interpolated between the shorter ones, at which the
mean loss of Muon's best rate reaches the target, over AdamW's; `seconds_ratio` the same for training time.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.common import configure, report
from cuadrilla.crew.local import run_local
from cuadrilla.rundir import RunDir
from cuadrilla.train.setup import assemble, make_task

ADAMW_RATES = (1e-3, 2e-3, 4e-3)
MUON_RATES = (0.01, 0.02, 0.04)
SHORTER = (0.4, 0.55, 0.7)

RUN = """
[run]
seed = {seed}
[data]
folder = "{data}"
[model]
preset = "micro"
[train]
tokens = {tokens}
batch_sequences = 16
unit_sequences = 16
[optim]
{optim}
[checkpoint]
every_seconds = 0
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 256
[sample]
tokens = 0
"""


def train(data: Path, *, tokens: int, seed: int, optim: str) -> dict[str, float]:
    """Held-out loss at the end of a run, and the seconds it took."""
    config = configure(RUN.format(seed=seed, data=data, tokens=tokens, optim=optim))
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name))
        context = assemble(config, run, task=make_task(config, run.path), sinks=[])
        began = time.perf_counter()
        outcome = run_local(context)
        seconds = time.perf_counter() - began
    return {"loss": float(outcome.last_row["val_loss"]), "seconds": seconds}


def sweep(data: Path, *, tokens: int, seeds: int, variants: dict[str, str]) -> dict[str, Any]:
    """Each variant with each seed; the best variant by mean loss."""
    runs = {
        name: [train(data, tokens=tokens, seed=seed, optim=optim) for seed in range(seeds)]
        for name, optim in variants.items()
    }
    means = {name: statistics.mean(run["loss"] for run in results) for name, results in runs.items()}
    best = min(means, key=means.__getitem__)
    seconds = statistics.median(run["seconds"] for run in runs[best])
    return {"tokens": tokens, "mean_loss": means, "best": best, "loss": means[best], "seconds": seconds, "runs": runs}


def crossing(points: list[tuple[float, float]], target: float) -> float | None:
    """Where a falling line through (x, loss) points reaches the target; None if it never does."""
    points = sorted(points)
    if points[0][1] <= target:
        return points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 > target >= y1:
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a prepared data folder")
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    data = arguments.data.resolve()
    adamw = sweep(
        data,
        tokens=arguments.tokens,
        seeds=arguments.seeds,
        variants={f"adamw {rate}": f'kind = "adamw"\nlr = {rate}' for rate in ADAMW_RATES},
    )
    variants = {
        f"muon {rate}": f'kind = "muon"\nlr = {rate}\nadamw_lr = {adamw["best"].split()[1]}' for rate in MUON_RATES
    }
    shorter = [
        sweep(data, tokens=int(arguments.tokens * part), seeds=arguments.seeds, variants=variants) for part in SHORTER
    ]
    tokens = crossing([(result["tokens"], result["loss"]) for result in shorter], adamw["loss"])
    seconds = crossing([(result["seconds"], result["loss"]) for result in shorter], adamw["loss"])
    report(
        "optimizers",
        target_loss=adamw["loss"],
        tokens_ratio=tokens / adamw["tokens"] if tokens else None,
        seconds_ratio=seconds / adamw["seconds"] if seconds else None,
        adamw=adamw,
        muon=shorter,
    )


if __name__ == "__main__":
    main()
