"""What a second model learns from a small text and from a first one, beside single models of tuned length and decay.

    python -m bench.teacher QUIJOTE [--characters 500000] [--epochs 4 8 16] [--decays 0 1] [--seeds 3]
        [--teacher 4 0 [--teacher-set model.width=256 model.layers=6]] [--taught 6 12] [--taught-decays 0]
        [--taught-set train.teacher_share=0.7]

Trains on the first so many characters of a text (0: all but the last ones), measures bits per byte on 100,000 further
on. Single models: each number of epochs with each weight decay, several seeds. Taught ones: a model of the setting
`--teacher` (without it: of the best one), which may be larger (`--teacher-set`), is the teacher of another one, with
each of `--taught` epochs and each of `--taught-decays`. `seconds` of a taught model are those of both trainings; the
best one is compared with the best single setting, of whatever length. Prints one JSON object.
"""

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from bench.common import report
from bench.little import Trained, options, text_of


def sets(epochs: float, decay: float, *more: str) -> tuple[str, ...]:
    return f"train.epochs={epochs:g}", f"optim.weight_decay={decay:g}", *more


def of(runs: Sequence[Trained], seconds: Sequence[float], **setting: float) -> dict[str, Any]:
    values = [run.bits_per_byte for run in runs]
    mean = statistics.mean(values)
    return {**setting, "bits_per_byte": mean, "seeds": values, "seconds": statistics.median(seconds)}


def bits(row: dict[str, Any]) -> float:
    return float(row["bits_per_byte"])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--epochs", type=float, nargs="+", default=[4, 8, 16])
    parser.add_argument("--decays", type=float, nargs="+", default=[0, 1])
    parser.add_argument("--teacher", type=float, nargs=2, metavar=("EPOCHS", "DECAY"))
    parser.add_argument("--teacher-set", nargs="+", default=[], metavar="KEY=VALUE", help="with --teacher")
    parser.add_argument("--taught-set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--taught", type=float, nargs="+", default=[6])
    parser.add_argument("--taught-decays", type=float, nargs="+", default=[0])
    arguments = parser.parse_args()
    with text_of(arguments) as text:
        seeds = range(arguments.seeds)
        runs_of: dict[tuple[float, float], list[Trained]] = {}
        for epochs, decay in product(arguments.epochs, arguments.decays):
            runs_of[epochs, decay] = [text.train(sets=sets(epochs, decay), seed=seed) for seed in seeds]
        singles = [
            of(runs, [run.seconds for run in runs], epochs=epochs, weight_decay=decay)
            for (epochs, decay), runs in runs_of.items()
        ]
        best = min(singles, key=bits)
        epochs, decay = arguments.teacher or (best["epochs"], best["weight_decay"])
        teachers = [] if arguments.teacher_set else runs_of.get((epochs, decay), [])
        chosen = sets(epochs, decay, *arguments.teacher_set)
        teachers = teachers or [text.train(sets=chosen, seed=seed) for seed in seeds]
        taught = []
        for longer, held in product(arguments.taught, arguments.taught_decays):
            runs = [
                text.train(sets=sets(longer, held, *arguments.taught_set), seed=100 + seed, teacher=teacher.run)
                for seed, teacher in enumerate(teachers)
            ]
            both = [one.seconds + other.seconds for one, other in zip(runs, teachers, strict=True)]
            taught.append(of(runs, both, epochs=longer, weight_decay=held))
        second = min(taught, key=bits)
        report(
            "teacher",
            train_tokens=text.num_tokens,
            singles=singles,
            best=best,
            teacher={"sets": " ".join(chosen), "seeds": [run.bits_per_byte for run in teachers]},
            taught=taught,
            fewer_bits=1 - second["bits_per_byte"] / best["bits_per_byte"],
        )


if __name__ == "__main__":
    main()
