"""What settings are worth on a small text: every combination of some values, several seeds, held-out bits per byte.

    python -m bench.grid QUIJOTE --set train.epochs=1,4,16 --set optim.weight_decay=0,1 --set model.dropout=0,0.1
    python -m bench.grid QUIJOTE --set train.epochs=0 --set train.tokens=300000 \\
        --set train.batch_sequences+train.unit_sequences=2,4,8,16

`--set KEY=VALUE,VALUE` for each setting that varies; keys joined by + always have the same value. `--work FOLDER` keeps
each training, and the same command goes on behind those that are there. Prints one JSON object: the settings in the
order of their mean bits per byte.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.common import report
from bench.little import Trained, options, text_of


def settings(axes: list[str]) -> list[tuple[str, ...]]:
    """Each combination of the axes' values as a list of `key=value`."""
    choices = []
    for axis in axes:
        keys, _, values = axis.partition("=")
        if not values:
            raise SystemExit(f"--set {axis}: KEY=VALUE,VALUE")
        choices.append([tuple(f"{key}={value}" for key in keys.split("+")) for value in values.split(",")])
    return [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*choices)]


def line(sets: Sequence[str], runs: Sequence[Trained]) -> dict[str, Any]:
    return {
        "sets": " ".join(sets),
        "bits_per_byte": statistics.mean(run.bits_per_byte for run in runs),
        "seeds": [run.bits_per_byte for run in runs],
        "seconds": statistics.median(run.seconds for run in runs),
        "skipped": sum(run.skipped for run in runs),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--set", action="append", default=[], dest="axes", metavar="KEY=VALUE,VALUE")
    arguments = parser.parse_args()
    runs: dict[tuple[str, ...], list[Trained]] = defaultdict(list)
    with text_of(arguments) as text:
        for seed, sets in itertools.product(range(arguments.seeds), settings(arguments.axes)):
            runs[sets].append(text.train(sets=sets, seed=seed))
        lines = sorted(itertools.starmap(line, runs.items()), key=lambda line: float(line["bits_per_byte"]))
        report("grid", train_tokens=text.num_tokens, characters=arguments.characters, table=lines)


if __name__ == "__main__":
    main()
