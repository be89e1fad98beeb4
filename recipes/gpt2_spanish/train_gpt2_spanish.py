"""Train a GPT-2 in Spanish on ./Data into ./checkpoints, alone or as a rank of torchrun; what was begun goes on.

Without prepared text in ./Data, a training alone takes the built-in stories."""

import argparse
import importlib.util
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import cuadrilla
from cuadrilla.api import Row
from cuadrilla.cli.output import report_error, say
from cuadrilla.data.folder import MANIFEST, read_manifest
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, DataError
from cuadrilla.host.torchrun import find_place
from cuadrilla.messages import Message
from cuadrilla.monitor.screen import duration
from cuadrilla.rundir import RunDir

LINE_SECONDS = 2.0
STORIES, VOCABULARY = "cuentos:500", 1024


def positive(text: str) -> int:
    """Raises ValueError."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=float, default=1.0, help="passes over the text (1)")
    parser.add_argument(
        "--batch-size", type=positive, default=32, help="sequences in a step, of all ranks together (32)"
    )
    parser.add_argument("--seq-len", type=positive, default=512, help="tokens in a sequence (512)")
    parser.add_argument("--preset", help="micro, mini, small (124M), medium, large, xl (mini; micro without a GPU)")
    parser.add_argument("--data", type=Path, default=Path("Data"), help="written by `cuadrilla data prepare` (./Data)")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="the run folder (./checkpoints)")
    return parser.parse_args()


def run_of(args: argparse.Namespace, settings: dict[str, Any], *, folder: Path) -> cuadrilla.Run:
    """The one that was begun in --out, or a new one in `folder`: --out is rank 0's to write."""
    if RunDir(args.out).run_file.is_file():
        return cuadrilla.open_run(args.out)
    return cuadrilla.new_run(folder, {"data": {"folder": str(args.data)}, **settings})


def chosen_preset() -> str:
    import torch

    preset = "mini" if torch.accelerator.is_available() else "micro"
    say("preset     {preset}; --preset takes another", preset=preset)
    return preset


def make_data(folder: Path, *, alone: bool) -> None:
    """Prepare the built-in stories in a folder that holds nothing. Raises DataError if it holds something else."""
    if not alone or (folder.exists() and any(folder.iterdir())):
        raise DataError(
            "{data} holds no prepared text",
            data=folder,
            hint="cuadrilla data get quijote --to textos, then: cuadrilla data prepare textos --out {data}",
        )
    say("data       {data} is empty: the built-in stories, {stories}", data=folder, stories=STORIES)
    cuadrilla.prepare([STORIES], out=folder, options=cuadrilla.PrepareOptions(vocab=VOCABULARY))


def steps_of(args: argparse.Namespace) -> int:
    tokens = read_manifest(args.data).splits["train"].num_tokens - 1
    return max(math.ceil(args.epochs * (tokens // args.seq_len) / args.batch_size), 1)


@contextmanager
def each_step(folder: Path, steps: int) -> Iterator[Callable[[Row], None]]:
    """Shows a line now and then, and writes TensorBoard's files where it is installed."""
    from cuadrilla.train.sinks import TensorBoardSink

    board = TensorBoardSink(RunDir(folder).tensorboard) if importlib.util.find_spec("tensorboard") else None
    told = 0.0
    first: tuple[float, int] | None = None

    def on_step(row: Row) -> None:
        nonlocal told, first
        if board is not None:
            board.log(row["version"], row)
        now, step = time.monotonic(), row["version"]
        begun, before = first = first or (now, step)  # what comes before the first step says nothing of the others
        if row["loss"] is not None and ("val_loss" in row or now - told > LINE_SECONDS):
            told = now
            rest = (now - begun) / max(step - before, 1) * max(steps - step, 0)
            say(
                "step {step} of {steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  {left}",
                step=step,
                steps=max(steps, step),
                loss=row["loss"],
                rate=row["tokens_per_second"],
                left=Message("about {time} left", time=duration(rest)) if step > before else "",
            )

    try:
        yield on_step
    finally:
        if board is not None:
            board.close()


def main() -> None:
    args = arguments()
    place = find_place()
    if not (args.data / MANIFEST).is_file():
        make_data(args.data, alone=place is None)
    settings = {
        "model": {"preset": args.preset or chosen_preset(), "context": args.seq_len},
        "train": {"epochs": args.epochs, "batch_sequences": args.batch_size, "unit_sequences": 1},
    }
    leads = place is None or place.leads
    with tempfile.TemporaryDirectory() as scratch:
        run = run_of(args, settings, folder=args.out if leads else Path(scratch) / "run")
        signal.signal(signal.SIGTERM, lambda *_: run.stop())  # how a container is told to end
        with each_step(run.path, steps_of(args)) if leads else nullcontext() as on_step:
            outcome = run.train(settings, on_step=on_step, tell=say, allow_changes=True)
    if leads:
        say("{reason} at step {step}: {folder}", reason=outcome.reason, step=outcome.version, folder=run.path)


if __name__ == "__main__":
    try:
        main()
    except cuadrilla.CuadrillaError as error:
        report_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
