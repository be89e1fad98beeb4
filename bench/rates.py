"""Learning rates: those that `cuadrilla tune` finds on real books, beside the defaults.

    python -m bench.rates FOLDER [--preset micro] [--tokens 3000000] [--trials 12] [--seeds 3] [--work FOLDER]

FOLDER holds one text file for each book; every fifteenth is held out whole. Searches the rates of Muon and AdamW in
three rungs with Optuna's TPE, each rung's runs three times as long, then trains both settings to the end with each
seed. Prints the rates, and bits per byte on the held-out books.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.common import report
from cuadrilla.config import MuonSection
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.data.shards import MANIFEST
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.runfile import read_run_file

EVERY = 15
RUN = """
[data]
folder = "{data}"
[model]
preset = "{preset}"
[train]
tokens = {tokens}
threads = {threads}
[evaluate]
sequences = {sequences}
[sample]
tokens = 0
[tune]
trials = {trials}
rungs = 3
factor = 3
[tune.space]
optim.lr = {{low = 0.004, high = 0.1, log = true}}
optim.adamw_lr = {{low = 0.0006, high = 0.015, log = true}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="micro")
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=512, help="of the held-out books, for each evaluation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, help="kept, and gone on with (default: a temporary folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(given, work=given.work or Path(temporary))


def measure(given: argparse.Namespace, *, work: Path) -> None:
    data = prepared(given.folder, work=work, vocabulary=given.vocabulary)
    base = work / f"rates-{given.preset}-{given.tokens}-{given.trials}"
    base.mkdir(parents=True, exist_ok=True)
    (base / "run.toml").write_text(RUN.format(data=data, **vars(given)), encoding="utf-8")
    cuadrilla("tune", str(base))
    usual, found = rates(base), rates(base / "tune" / "best")
    measured = {
        name: [bits(base, name, seed=seed, sets=sets) for seed in range(given.seeds)]
        for name, sets in (("usual", usual), ("found", found))
    }
    means = {name: statistics.mean(values) for name, values in measured.items()}
    report(
        "rates",
        preset=given.preset,
        tokens=given.tokens,
        usual=list(usual),
        found=list(found),
        bits_per_byte=measured,
        found_over_usual=means["found"] / means["usual"],
    )


def prepared(folder: Path, *, work: Path, vocabulary: int) -> Path:
    """Training data of the books, once."""
    data = work / f"{folder.name}-{vocabulary}"
    if not (data / MANIFEST).exists():
        books = [str(path) for path in sorted(folder.iterdir()) if path.is_file()]
        held_out = tuple(books[::EVERY])
        train = [book for book in books if book not in held_out]
        prepare(train, out=data, options=PrepareOptions(vocab=vocabulary, val=held_out))
    return data.resolve()


def rates(folder: Path) -> tuple[str, str]:
    """As `--set` takes them."""
    optim = read_run_file(folder / "run.toml").config.optim
    assert isinstance(optim, MuonSection)
    return f"optim.lr={optim.lr}", f"optim.adamw_lr={optim.adamw_lr}"


def bits(base: Path, name: str, *, seed: int, sets: Sequence[str]) -> float:
    """Of a whole run with these settings; one that has ended is not trained again."""
    run = RunDir(base / f"{name}-{seed}")
    run.path.mkdir(exist_ok=True)
    if not run.run_file.exists():
        run.run_file.write_bytes((base / "run.toml").read_bytes())
    words = [word for each in (*sets, f"run.seed={seed}") for word in ("--set", each)]
    cuadrilla("train", str(run.path), *words)
    found = [row["val_bits_per_byte"] for row in last_rows(run.metrics) if "val_bits_per_byte" in row]
    print(json.dumps({"setting": name, "seed": seed, "bits_per_byte": found[-1]}), file=sys.stderr, flush=True)
    return float(found[-1])


def cuadrilla(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "cuadrilla", "--json", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
