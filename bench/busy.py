"""What a training step costs beside another program that computes, by how long OpenMP's threads spin for each other.

    python -m bench.busy [--preset micro] [--tokens 1024] [--spins 2000 300000] [--busy 1] [--rounds 9] [--threads 2]

For each number of spins a process with the model makes steps in turn with the others (a pass over so many tokens and
Muon's update, fp32), alone and beside so many processes that do nothing but count. 300,000 is libgomp's own choice.
Prints one JSON object.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import torch

from bench.common import report, summary, timed
from bench.kernels import VOCABULARIES
from cuadrilla.config import ModelSection, MuonSection
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.host.openmp import SPINS
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import shape_of
from cuadrilla.train.optim import make_optimizer

COUNTS = "while True: pass"
PAUSE_SECONDS = 0.05
"""After which no thread of another process spins any more."""


def answer(preset: str, *, tokens: int, threads: int) -> None:
    """A step for each line of standard input: its seconds."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    model = GPT2(shape_of(ModelSection.model_validate({"preset": preset}), tokens=VOCABULARIES[preset]))
    parameters = dict(model.named_parameters())
    make = make_optimizer(MuonSection(), is_matrix=lambda _, p: p.ndim == 2, dtype=torch.float32)
    optimizers = make(parameters)
    ids = torch.randint(model.config.vocab_size, (max(1, tokens // model.config.context), model.config.context))

    def step() -> None:
        torch.autograd.backward([model.loss(ids, ids)])
        optimizers.step(0.01)
        model.zero_grad()

    step()
    for _ in sys.stdin:
        print(timed(step), flush=True)


@contextmanager
def stepper(spins: int, arguments: argparse.Namespace) -> Iterator["subprocess.Popen[str]"]:
    numbers = [f"--{name}={getattr(arguments, name)}" for name in ("preset", "tokens", "threads")]
    with subprocess.Popen(
        [sys.executable, "-m", "bench.busy", "--answers", *numbers],
        env={**os.environ, "GOMP_SPINCOUNT": str(spins)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def step_of(process: "subprocess.Popen[str]") -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextmanager
def counting(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", COUNTS], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=VOCABULARIES, default="micro")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--spins", type=int, nargs="+", default=[int(SPINS), 300_000])
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answers:
        answer(arguments.preset, tokens=arguments.tokens, threads=arguments.threads)
        return
    seconds: dict[tuple[int, int], list[float]] = {}
    with ExitStack() as stack:
        steppers = {spins: stack.enter_context(stepper(spins, arguments)) for spins in arguments.spins}
        for busy in (0, arguments.busy):
            with counting(busy):
                for _ in range(arguments.rounds):
                    for spins, process in steppers.items():
                        time.sleep(PAUSE_SECONDS)
                        seconds.setdefault((busy, spins), []).append(step_of(process))
    report(
        "busy",
        preset=arguments.preset,
        tokens=arguments.tokens,
        step_threads=arguments.threads,
        milliseconds={
            f"{busy} others, {spins} spins": summary([1e3 * each for each in values])
            for (busy, spins), values in seconds.items()
        },
        beside_alone={
            str(spins): median(seconds[arguments.busy, spins]) / median(seconds[0, spins]) for spins in arguments.spins
        },
    )


if __name__ == "__main__":
    main()
