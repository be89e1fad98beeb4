"""What successive halving saves: the score that a random search ends with, and what each has trained to get there.

    python -m bench.tune TEXT [--tokens 600000] [--trials 16] [--halving-trials 20] [--seeds 3] [--work FOLDER]
        [--sampler tpe] [--factor 4] [--rungs 3]

`cuadrilla tune` twice for each seed, over learning rates, weight decay and the size of a step of `gpt2-micro`: by
chance with every trial to its end, and in rungs, by `--sampler`. `tokens_over_random`: what the rungs had trained when
they first had a score as good as the best of the random search, or a better one (`reached`), over all that the other
trained.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import report, search_rows
from bench.little import Text

RUN = """
[data]
folder = "{data}"
[model]
preset = "micro"
context = 128
[train]
tokens = {tokens}
threads = {threads}
[evaluate]
sequences = 0
[sample]
tokens = 0
[tune]
sampler = "{sampler}"
trials = {trials}
rungs = {rungs}
factor = {factor}
seed = {seed}
[tune.space]
optim.lr = {{low = 0.002, high = 0.2, log = true}}
optim.adamw_lr = {{low = 0.0003, high = 0.03, log = true}}
optim.weight_decay = {{low = 0.0, high = 0.5}}
train.batch_sequences = {{choices = [8, 16, 32]}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--characters", type=int, default=500_000)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--halving-trials", type=int, default=20)
    parser.add_argument("--rungs", type=int, default=3)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--sampler", choices=["random", "tpe"], default="tpe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, help="kept, and gone on with (default: a temporary folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        text = Text(given.text, characters=given.characters, work=work, threads=1, vocabulary=given.vocabulary)
        found = [of(seed, text=text, given=given) for seed in range(given.seeds)]
    report("tune", tokens=given.tokens, trials=given.trials, halving_trials=given.halving_trials, seeds=found)


def of(seed: int, *, text: Text, given: argparse.Namespace) -> dict[str, Any]:
    random = search(text, given=given, seed=seed, trials=given.trials, sampler="random", rungs=1)
    halving = search(
        text, given=given, seed=seed, trials=given.halving_trials, sampler=given.sampler, rungs=given.rungs
    )
    best = min(row["score"] for row in random if row["score"] is not None)
    trained, reached = 0, None
    for row in halving:
        trained += row["tokens"]
        whole = row["rung"] == given.rungs - 1 and row["score"] is not None
        if reached is None and whole and row["score"] <= best:
            reached = trained
    whole = [row["score"] for row in halving if row["rung"] == given.rungs - 1 and row["score"] is not None]
    all_random = sum(row["tokens"] for row in random)
    return {
        "seed": seed,
        "random_best": best,
        "halving_best": min(whole, default=None),
        "random_tokens": all_random,
        "halving_tokens": trained,
        "halving_over_random": trained / all_random,
        "reached": reached is not None,
        "tokens_over_random": None if reached is None else reached / all_random,
    }


def search(
    text: Text, *, given: argparse.Namespace, seed: int, trials: int, sampler: str, rungs: int
) -> list[dict[str, Any]]:
    """What its runs gave, in the order in which they ended."""
    parts = [sampler, given.tokens, trials, rungs, *([given.factor] if rungs > 1 else []), seed]
    folder = text.work / "-".join(["tune", *map(str, parts)])
    folder.mkdir(exist_ok=True)
    settings = {"tokens": given.tokens, "threads": given.threads, "factor": given.factor}
    settings |= {"sampler": sampler, "trials": trials, "rungs": rungs, "seed": seed}
    (folder / "run.toml").write_text(RUN.format(data=text.data, **settings), encoding="utf-8")
    command = [sys.executable, "-m", "cuadrilla", "--json", "tune", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = search_rows(folder)
    print(json.dumps({"seed": seed, "rungs": rungs, "ended": len(rows)}), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
