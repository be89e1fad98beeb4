"""Greedy generation beside transformers' `generate`, with the same weights, threads and precision, in turns.

    python -m bench.generate [--shape 124m 10m] [--precision fp32 bf16]

The weights are random. Each repeat times one stream of cuadrilla, one stream of transformers and a batch of cuadrilla
(`--batch` rows), in alternating order, prefill included. Reported are medians. `identical`: whether both streams have
the same tokens, which is expected in fp32; in bf16 rounding differs. `batch_over_stream`: tokens per second of the
batch over those of the stream of transformers.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

from bench.common import in_turns, options, report
from cuadrilla.host.process import keep_freed_memory
from cuadrilla.model.generate import generate, generate_batch
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import config_to_hf, state_to_hf
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.sampling import Sampling

SHAPES = {  # layers, heads, width, context, vocabulary
    "124m": (12, 12, 768, 1024, 50257),
    "10m": (6, 5, 320, 512, 8192),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_model(shape: str) -> GPT2:
    layers, heads, width, context, vocab_size = SHAPES[shape]
    torch.manual_seed(0)
    return GPT2(GPT2Config(vocab_size=vocab_size, context=context, layers=layers, heads=heads, width=width))


class Theirs:
    """The same model in transformers."""

    def __init__(self, ours: GPT2, *, precision: str) -> None:
        transformers.logging.set_verbosity_error()
        warnings.filterwarnings("ignore")
        self._model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**config_to_hf(ours.config, end_of_text=None))
        )
        self._model.load_state_dict(state_to_hf(ours.state_dict()), strict=False)
        self._model.to(DTYPES[precision]).eval()

    def tokens(self, prompt: list[int], *, number: int) -> list[int]:
        """Generate this number of new tokens greedily."""
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": number, "min_new_tokens": number}
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length
        )
        tokens: list[int] = found[0, len(prompt) :].tolist()
        return tokens


def measure(shape: str, precision: str, given: argparse.Namespace) -> dict[str, Any]:
    model = random_model(shape)
    theirs, tokens, rows = Theirs(model, precision=precision), given.new_tokens, given.batch
    model.compute_dtype = DTYPES[precision]
    ours = InferenceModel(model)  # made once, before the timing: transformers' model is cast once, too
    prompts = torch.randint(model.config.vocab_size, (rows, given.prompt_tokens)).tolist()
    sampling = Sampling(temperature=0, max_tokens=tokens)
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: list(generate(ours, prompts[0], sampling=sampling)),
        "transformers": lambda: theirs.tokens(prompts[0], number=tokens),
        "batch": lambda: generate_batch(ours, prompts, sampling=sampling),
    }
    warm = {name: run() for name, run in runs.items()}
    seconds = {name: statistics.median(each) for name, each in in_turns(runs, rounds=given.repeats).items()}
    return {
        "model": shape,
        "precision": precision,
        "identical": warm["ours"] == warm["transformers"],
        "speedup": seconds["transformers"] / seconds["ours"],
        "tokens_per_second": {name: tokens / seconds[name] for name in ("ours", "transformers")},
        "batch_tokens_per_second": rows * tokens / seconds["batch"],
        "batch_over_stream": rows * seconds["transformers"] / seconds["batch"],
    }


def main() -> None:
    given = options(
        __doc__, shape=list(SHAPES), precision=["fp32"], prompt_tokens=32, new_tokens=128, repeats=5,
        threads=torch.get_num_threads(), batch=16,
    )  # fmt: skip
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    results = [measure(shape, precision, given) for shape in given.shape for precision in given.precision]
    report("generate", **vars(given), results=results)


if __name__ == "__main__":
    main()
