"""What settings are worth on a small text: every combination of some values, several seeds, held-out bits per byte.

    python -m bench.grid QUIJOTE --set train.epochs=1,4,16 --set optim.weight_decay=0,1 --set model.dropout=0,0.1
    python -m bench.grid QUIJOTE --set train.epochs=0 --set train.tokens=300000 \\
        --set train.batch_sequences+train.unit_sequences=2,4,8,16

`--set KEY=VALUE,VALUE` for each setting that varies; keys joined by + always have the same value. `--rows FILE` keeps
each training's row at once, and the same command goes on behind those that are there. Prints one JSON object: the
settings in the order of their mean bits per byte.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.common import report
from bench.little import Text
from cuadrilla.rundir import read_jsonl


def settings(axes: list[str]) -> list[tuple[str, ...]]:
    """Each combination of the axes' values as a list of `key=value`."""
    choices = []
    for axis in axes:
        keys, _, values = axis.partition("=")
        if not values:
            raise SystemExit(f"--set {axis}: KEY=VALUE,VALUE")
        choices.append([tuple(f"{key}={value}" for key in keys.split("+")) for value in values.split(",")])
    return [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*choices)]


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[tuple(row["sets"])].append(row)
    lines = [
        {
            "sets": " ".join(sets),
            "bits_per_byte": statistics.mean(row["bits_per_byte"] for row in of),
            "seeds": [row["bits_per_byte"] for row in of],
            "seconds": statistics.median(row["seconds"] for row in of),
            "skipped": sum(row["skipped"] for row in of),
        }
        for sets, of in found.items()
    ]
    return sorted(lines, key=lambda line: float(line["bits_per_byte"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="axes", metavar="KEY=VALUE,VALUE")
    parser.add_argument("--characters", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--rows", type=Path, help="keep each row here, and leave out what is there")
    arguments = parser.parse_args()
    rows = list(read_jsonl(arguments.rows)) if arguments.rows and arguments.rows.exists() else []
    done = {(tuple(row["sets"]), row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        text = Text(
            arguments.text,
            characters=arguments.characters,
            work=Path(folder),
            threads=arguments.threads,
            vocabulary=arguments.vocabulary,
        )
        for seed, sets in itertools.product(range(arguments.seeds), settings(arguments.axes)):
            if (sets, seed) in done:
                continue
            found = text.train(sets=sets, seed=seed)
            row = {"sets": sets, "seed": seed, "bits_per_byte": found.bits_per_byte}
            rows.append({**row, "seconds": found.seconds, "skipped": found.skipped})
            if arguments.rows:
                with open(arguments.rows, "a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
        report("grid", train_tokens=text.num_tokens, characters=arguments.characters, table=table(rows))


if __name__ == "__main__":
    main()
