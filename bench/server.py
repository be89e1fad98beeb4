"""The asynchronous strategy beside the exact one: steps per second and held-out loss of a practice crew of 1.0 and 0.2.

    python -m bench.server [--steps 200] [--repeats 2]

Trains `micro` (context 128) on the built-in stories with AdamW, fp32, worker processes of one thread, every setting
once per turn. The first twenty steps are not timed: workers start. `staleness`: mean and most.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common import configure, report, summary
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.link.ciphers import allow_only_new_tls
from cuadrilla.rundir import RunDir, write_json
from cuadrilla.runfile import dump
from cuadrilla.train.setup import assemble, make_task
from cuadrilla.train.sinks import Scalars

SETTINGS = {  # name → workers, sync
    "exact, 1.0 alone": ([1.0], 'kind = "exact"'),
    "exact, 1.0 and 0.2": ([1.0, 0.2], 'kind = "exact"'),
    "server, bound 4": ([1.0, 0.2], 'kind = "server"\nstaleness = 4'),
    "server, bound 16": ([1.0, 0.2], 'kind = "server"\nstaleness = 16'),
}
UNTIMED_STEPS = 20
RUN = """
[data]
folder = "{data}"
[model]
preset = "micro"
context = 128
[train]
steps = {steps}
batch_sequences = 16
unit_sequences = 1
threads = 1
precision = "fp32"
[optim]
kind = "adamw"
lr = 0.003
[sync]
{sync}
[engine]
kind = "crew"
workers = {workers}
[checkpoint]
every_seconds = 0
journal = "off"
[evaluate]
every_tokens = 1_000_000_000
sequences = 256
[sample]
tokens = 0
"""


class Rows:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def log(self, _step: int, scalars: Scalars) -> None:
        self.rows.append(dict(scalars))

    def close(self) -> None:
        pass


def train(data: Path, *, steps: int, workers: list[float], sync: str) -> list[Mapping[str, Any]]:
    """The rows of one training."""
    config = configure(RUN.format(data=data, steps=steps, workers=workers, sync=sync))
    with tempfile.TemporaryDirectory() as name:
        run, kept = RunDir(Path(name)), Rows()
        run.logs.mkdir()
        write_json(run.config, {"values": dump(config)})
        from cuadrilla.engines.crew import Opening, run_crew  # grpc must not be imported before main()

        run_crew(assemble(config, run, task=make_task(config, run.path), sinks=[kept]), run, opening=Opening())
        return kept.rows


def measure(rows: list[Mapping[str, Any]]) -> dict[str, float]:
    timed = rows[UNTIMED_STEPS:]
    ages = [row.get("staleness", 0) for row in timed]
    return {
        "steps_per_second": len(timed) / sum(row["seconds"] for row in timed),
        "held_out_loss": rows[-1]["val_loss"],
        "mean_staleness": statistics.mean(ages),
        "most_staleness": max(ages),
    }


def main() -> None:
    allow_only_new_tls()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--stories", type=int, default=20_000, help="to train on")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        prepare([f"cuentos:{arguments.stories}"], out=data, options=PrepareOptions(vocab=512))
        for _ in range(arguments.repeats):
            for setting, (workers, sync) in SETTINGS.items():
                found[setting].append(measure(train(data, steps=arguments.steps, workers=workers, sync=sync)))
    results = {
        setting: {key: summary([turn[key] for turn in turns]) for key in turns[0]} for setting, turns in found.items()
    }
    report("server", steps=arguments.steps, results=results)


if __name__ == "__main__":
    main()
