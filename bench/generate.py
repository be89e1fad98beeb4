"""Greedy generation against transformers' `generate`: same weights, same threads, same precision, turns taken.

    python -m bench.generate [--shape 124m 10m] [--model FOLDER] [--precision fp32 bf16] [--clock wall|cpu]

Each repeat times one stream of ours and of theirs, and a batch of ours (`--batch`, 0: none), in alternating order;
reported are medians and the quartiles. Prefill is included. `--clock cpu` counts processor seconds of this process: use
it with `--threads 1` on a machine that is busy with other things. `identical` says whether all tokens agree (expected
in fp32; in bf16 rounding differs). `batch_over_stream`: tokens of our batch over those of one stream of transformers.
`weights_gb_per_second` is what one stream reads, all weights once for each token; `machine_gb_per_second` a product of
one row with a matrix of 512 MB, in the same turns.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.common import report
from cuadrilla.host.process import keep_freed_memory
from cuadrilla.model.generate import generate, generate_batch
from cuadrilla.model.gpt2 import GPT2, GPT2Config, Linear
from cuadrilla.model.hf import config_to_hf, load_hf, state_to_hf
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.sampling import Sampling
from cuadrilla.rundir import RunDir
from cuadrilla.train.trained import load_trained

SHAPES = {  # layers, heads, width, context, vocabulary
    "124m": (12, 12, 768, 1024, 50257),
    "10m": (6, 5, 320, 512, 8192),
}
READ_NUMBERS = 2**27
"""Of the matrix that shows how fast the machine reads."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[arguments.clock]
    results = []
    for name in [arguments.model] if arguments.model else arguments.shape:
        weights = f"folder {Path(name).name}" if arguments.model else f"random, seed {arguments.seed}"
        for precision in arguments.precision:
            ours = load(Path(name)) if arguments.model else random_model(name, seed=arguments.seed)
            pair = Pair(ours, dtype=DTYPES[precision], arguments=arguments)
            results.append(
                {"model": Path(name).name, "weights": weights, "precision": precision, **pair.measure(clock)}
            )
    report(
        "generate",
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        threads=arguments.threads,
        clock=arguments.clock,
        repeats=arguments.repeats,
        results=results,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--model", help="a run or a Hugging Face folder; without it, random weights of --shape")
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--batch", type=int, default=16, help="so many prompts at once beside one stream")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(folder: Path) -> GPT2:
    """Trained weights, of a run directory or in Hugging Face's layout."""
    if RunDir(folder).run_file.exists():
        model = load_trained(RunDir(folder), device="cpu").model
        assert isinstance(model, GPT2)
        return model
    return load_hf(folder)


def random_model(shape: str, *, seed: int) -> GPT2:
    layers, heads, width, context, vocab_size = SHAPES[shape]
    torch.manual_seed(seed)
    return GPT2(GPT2Config(vocab_size=vocab_size, context=context, layers=layers, heads=heads, width=width))


class Pair:
    """The same model twice, and the same prompts."""

    def __init__(self, ours: GPT2, *, dtype: torch.dtype, arguments: argparse.Namespace) -> None:
        config = transformers.GPT2Config(**config_to_hf(ours.config, end_of_text=None))
        self.theirs = transformers.GPT2LMHeadModel(config)
        self.theirs.load_state_dict(state_to_hf(ours.state_dict()), strict=False)
        self.theirs.to(dtype).eval()
        ours.compute_dtype = dtype
        self.ours = InferenceModel(ours)  # once, as theirs is cast once
        torch.manual_seed(arguments.seed)
        self.prompts = torch.randint(ours.config.vocab_size, (max(arguments.batch, 1), arguments.prompt_tokens))
        self.sampling = Sampling(temperature=0, max_tokens=arguments.new_tokens)
        self.batch, self.repeats = arguments.batch, arguments.repeats
        self.num_bytes = num_weights(ours) * dtype.itemsize
        self.to_read = torch.ones(READ_NUMBERS).view(-1, 1024)

    def measure(self, clock: Callable[[], float]) -> dict[str, Any]:
        one = self.prompts[0].tolist()
        runs: dict[str, Callable[[], object]] = {
            "ours": lambda: [list(generate(self.ours, one, sampling=self.sampling))],
            "transformers": lambda: self.their_tokens(self.prompts[:1]),
            "machine": lambda: torch.nn.functional.linear(self.to_read[:1], self.to_read),
        }
        if self.batch:
            runs["batch"] = lambda: generate_batch(self.ours, self.prompts.tolist(), sampling=self.sampling)
        warm = {name: run() for name, run in runs.items()}
        seconds = in_turns(runs, clock=clock, repeats=self.repeats)
        middle = {name: statistics.median(values) for name, values in seconds.items()}
        tokens = self.sampling.max_tokens
        found: dict[str, Any] = {
            "identical": warm["ours"] == warm["transformers"],
            "speedup": round(middle["transformers"] / middle["ours"], 3),
            "ours": summary(seconds["ours"], tokens=tokens, num_bytes=self.num_bytes),
            "transformers": summary(seconds["transformers"], tokens=tokens, num_bytes=self.num_bytes),
            "machine_gb_per_second": round(4e-9 * READ_NUMBERS / middle["machine"], 2),
        }
        if self.batch:
            found[f"batch_{self.batch}"] = summary(seconds["batch"], tokens=tokens * self.batch)
            found["batch_over_stream"] = round(self.batch * middle["transformers"] / middle["batch"], 2)
        return found

    def their_tokens(self, prompts: torch.Tensor) -> list[list[int]]:
        tokens = self.theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=self.sampling.max_tokens,
            min_new_tokens=self.sampling.max_tokens,
            pad_token_id=0,
        )
        return [row[prompts.shape[1] :] for row in tokens.tolist()]


def num_weights(model: GPT2) -> int:
    """Numbers that are read for a token: those of all products."""
    linears = (module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    return model.head.weight.numel() + sum(linears)


def in_turns(
    runs: dict[str, Callable[[], object]], *, clock: Callable[[], float], repeats: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    turns = list(runs)
    for _ in range(repeats):
        for name in turns:
            start = clock()
            runs[name]()
            seconds[name].append(clock() - start)
        turns.reverse()
    return seconds


def summary(seconds: list[float], *, tokens: int, num_bytes: int = 0) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    found: dict[str, Any] = {
        "tokens_per_second": round(tokens / middle, 2),
        "milliseconds_per_token": round(1000 * middle / tokens, 3),
        "seconds_quartiles": [round(value, 4) for value in (low, middle, high)],
    }
    if num_bytes:
        found["weights_gb_per_second"] = round(1e-9 * num_bytes * tokens / middle, 2)
    return found


if __name__ == "__main__":
    main()
