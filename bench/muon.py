"""What part of a step on a processor is the optimizer's, with Muon for the matrices inside the model.

    python -m bench.muon [--preset micro mini] [--tokens 1024 2048 16384] [--threads 2] [--precision auto] [--rounds 9]

One forward and backward pass over 1,024 tokens and one update in turn; of a step of so many tokens the update's part is
reckoned from both. Prints one JSON object.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

from bench.common import report, summary
from bench.kernels import VOCABULARIES, seconds
from cuadrilla.config import ModelSection, MuonSection
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import shape_of
from cuadrilla.train.kernels import choose_kernels
from cuadrilla.train.optim import make_optimizer
from cuadrilla.train.precision import choose_precision

PASS_TOKENS = 1024


def measure(preset: str, arguments: argparse.Namespace) -> dict[str, Any]:
    config = shape_of(ModelSection.model_validate({"preset": preset}), tokens=VOCABULARIES[preset])
    model, chosen = GPT2(config), choose_precision(arguments.precision, device=torch.device("cpu"))
    chosen.apply(model)
    choose_kernels(model, device=torch.device("cpu"), dtype=chosen.dtype, strict=False)
    make = make_optimizer(
        MuonSection(), is_matrix=lambda name, p: p.ndim == 2 and name.startswith("transformer.h."), dtype=chosen.dtype
    )
    parameters = dict(model.named_parameters())
    optimizers = make(parameters)
    ids = torch.randint(config.vocab_size, (max(1, PASS_TOKENS // config.context), config.context))
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    passes, updates = [], []
    for number in range(1 + arguments.rounds):
        passes += [seconds(model, ids)][: min(number, 1)]
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        began = time.perf_counter()
        optimizers.step(0.01)
        updates += [time.perf_counter() - began][: min(number, 1)]
    by_token = median(passes) / ids.numel()
    return {
        "precision": str(chosen),
        "pass_milliseconds": summary([1e3 * value for value in passes]),
        "update_milliseconds": summary([1e3 * value for value in updates]),
        "part_of_a_step": {
            str(tokens): median(updates) / (median(updates) + by_token * tokens) for tokens in arguments.tokens
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", choices=VOCABULARIES, default=["micro", "mini"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 16_384], help="in a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    found = {preset: measure(preset, arguments) for preset in arguments.preset}
    report("muon", **found)


if __name__ == "__main__":
    main()
