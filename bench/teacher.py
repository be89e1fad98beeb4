"""What a second model learns from a small text and from a first one, beside single models of tuned length and decay.

    python -m bench.teacher QUIJOTE [--characters 500000] [--epochs 3 6 12] [--decays 0 1] [--seeds 3] [--taught 6]

Trains on the first so many characters of a text (0: all but the last ones), measures bits per byte on 100,000 further
on. Single models: each number of epochs with each weight decay, several seeds. Taught ones: a model of the best of
these settings is the teacher of another one with `--taught` epochs and the same decay. `seconds` of a taught model are
those of both trainings; it is compared with the best single setting, of whatever length. Prints one JSON object.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import report
from bench.little import Text, Trained


def sets(epochs: float, decay: float) -> tuple[str, str]:
    return f"train.epochs={epochs}", f"optim.weight_decay={decay}"


def of(runs: Sequence[Trained], seconds: Sequence[float], **setting: float) -> dict[str, Any]:
    values = [run.bits_per_byte for run in runs]
    mean = statistics.mean(values)
    return {**setting, "bits_per_byte": mean, "seeds": values, "seconds": statistics.median(seconds)}


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
        runs_of: dict[tuple[float, float], list[Trained]] = {}
        for epochs in arguments.epochs:
            for decay in arguments.decays:
                runs = [text.train(sets=sets(epochs, decay), seed=seed) for seed in range(arguments.seeds)]
                runs_of[epochs, decay] = runs
                singles.append(of(runs, [run.seconds for run in runs], epochs=epochs, weight_decay=decay))
        best = min(singles, key=lambda row: float(row["bits_per_byte"]))
        decay, teachers = best["weight_decay"], runs_of[best["epochs"], best["weight_decay"]]
        taught = [
            text.train(sets=sets(arguments.taught, decay), seed=100 + seed, teacher=teacher.run)
            for seed, teacher in enumerate(teachers)
        ]
        both = [one.seconds + other.seconds for one, other in zip(taught, teachers, strict=True)]
        second = of(taught, both, epochs=arguments.taught, weight_decay=decay)
        report(
            "teacher",
            train_tokens=text.num_tokens,
            singles=singles,
            best=best,
            taught=second,
            fewer_bits=1 - second["bits_per_byte"] / best["bits_per_byte"],
        )


if __name__ == "__main__":
    main()
