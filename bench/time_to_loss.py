"""How soon an unequal crew is where its best machine alone would be: real processes, practice speeds, a shaped link.

    python -m bench.time_to_loss DATA_FOLDER [--speeds 8,4,2,1] [--link 100mbit+1ms] [--steps 400] [--seeds 3]

A step of the crew is a unit of 128 tokens for each of the speeds' sum; the fastest machine is one thread, and alone it
does steps of its own units. `alone`: runs of 1, 1.5 and 2 times as many steps, each with a schedule of its own, are the
scale. `times`: how long the best machine alone trains for the loss that a crew has at its end, in times of the crew's
own seconds; the ideal is the speeds' sum over the largest. Losses are held out, seconds those of the steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import report
from bench.lanes import LONGER, RUN, Variant, times_longer
from cuadrilla.rundir import RunDir, last_rows

SETTINGS = [("train.threads", "1"), ("evaluate.sequences", "256"), ("sample.tokens", "0")]


@dataclass(frozen=True, kw_only=True)
class Trained:
    loss: float
    seconds: float
    tokens_per_second: float


def train(data: Path, *, batch: int, steps: int, seed: int, length: int, options: Sequence[str] = ()) -> Trained:
    """One run, as it is typed."""
    with tempfile.TemporaryDirectory(prefix="cua-loss-") as name:
        text = RUN.format(
            seed=seed, data=data.resolve(), steps=steps, batch=batch, length=length, optim=Variant().optim
        )
        run = RunDir(Path(name))
        run.run_file.write_text(text)
        settings = [word for key, value in SETTINGS for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "cuadrilla", "train", name, *settings, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows = last_rows(run.metrics)
    seconds = sum(row["seconds"] for row in rows)
    return Trained(loss=rows[-1]["val_loss"], seconds=seconds, tokens_per_second=rows[-1]["tokens"] / seconds)


def crews(speeds: Sequence[int], link: str) -> dict[str, list[str]]:
    """The options of each variant."""
    relative = ",".join(str(speed / max(speeds)) for speed in speeds)
    shaped = ["--practice", f"{relative}@{link}"]
    windows = ["--set", "sync.kind=windows", "--set"]
    return {
        "exact, no limit": ["--practice", relative],
        "exact": shaped,
        **{f"windows of {steps}": [*shaped, *windows, f"sync.steps={steps}"] for steps in (4, 8, 16)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a prepared data folder")
    parser.add_argument("--speeds", default="8,4,2,1")
    parser.add_argument("--link", default="100mbit+1ms", help="of each worker, each way")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="names of variants, divided by ;")
    arguments = parser.parse_args()
    speeds = [int(speed) for speed in arguments.speeds.split(",")]
    variants = crews(speeds, arguments.link)
    chosen = arguments.only.split(";") if arguments.only else list(variants)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        alone: dict[float, float] = {}
        seconds = 0.0
        for times in LONGER:
            steps = round(times * arguments.steps)
            one = train(arguments.data, batch=max(speeds), steps=steps, seed=seed, length=arguments.length)
            alone[times] = one.loss
            seconds = seconds or one.seconds
            note("alone", {"times": times, **vars(one)}, results)
        for name in chosen:
            batch, options = sum(speeds), variants[name]
            crew = train(
                arguments.data, batch=batch, steps=arguments.steps, seed=seed, length=arguments.length, options=options
            )
            note(name, {**vars(crew), "times": times_longer(crew.loss, alone) * seconds / crew.seconds}, results)
    report(
        "time_to_loss",
        ideal=sum(speeds) / max(speeds),
        link=arguments.link,
        steps=arguments.steps,
        times={name: statistics.median(each["times"] for each in results[name]) for name in chosen},
        results=results,
    )


def note(name: str, found: dict[str, float], results: dict[str, list[dict[str, float]]]) -> None:
    results.setdefault(name, []).append(found)
    print(name, json.dumps({key: round(value, 4) for key, value in found.items()}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
