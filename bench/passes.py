"""How many sequences a forward and backward pass should hold on a processor.

    python -m bench.passes [--preset micro] [--sizes 1 2 4 8 16] [--rounds 5] [--threads 2] [--precision auto]

Passes over random tokens in turn, each size over as many sequences in all as the largest one has: seconds per sequence
beside those of the largest pass.
"""

import argparse
import time

import torch

from bench.common import ratios, report, summary
from cuadrilla.config import ModelSection
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import shape_of
from cuadrilla.train.precision import choose_precision


def seconds_per_sequence(model: GPT2, size: int, *, total: int) -> float:
    ids = torch.randint(model.config.vocab_size, (size, model.config.context))
    began = time.perf_counter()
    for _ in range(total // size):
        torch.autograd.backward([model.loss(ids, ids)])
    model.zero_grad()
    return (time.perf_counter() - began) / (total // size * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="micro")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--precision", default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    model = GPT2(shape_of(ModelSection(preset=arguments.preset), tokens=arguments.vocabulary))
    precision = choose_precision(arguments.precision, device=torch.device("cpu"))
    precision.apply(model)
    largest = max(arguments.sizes)
    seconds_per_sequence(model, largest, total=largest)  # the first pass of a process is slow
    took: dict[int, list[float]] = {size: [] for size in arguments.sizes}
    for _ in range(arguments.rounds):
        for size in arguments.sizes:
            took[size].append(seconds_per_sequence(model, size, total=largest))
    report(
        "passes",
        preset=arguments.preset,
        precision=str(precision),
        sequence_tokens=model.config.context,
        milliseconds_per_sequence={size: summary([1e3 * each for each in values]) for size, values in took.items()},
        beside_the_largest={size: ratios(values, took[largest]) for size, values in took.items()},
    )


if __name__ == "__main__":
    main()
