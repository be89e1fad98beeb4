"""Speed of `cuadrilla serve` for one client and for several, beside one stream of transformers.

    python -m bench.serve [--shape 124m] [--precision fp32] [--clients 1 16]

One process serves a model of random weights. Another process plays the clients; it has the lowest priority and shares
the cores with the service. After a request that is not counted, each client sends `--requests` prompts of 32 random
tokens, one after the other, and reads the answers as streams. `over_stream`: tokens per second of all clients over
those of one stream of transformers in the same precision, which is measured before the service is started.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import aiohttp
import torch
import transformers

from bench.common import options, percentile, report, timed, tokenizer_of
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import config_to_hf, save_hf, state_to_hf
from tests.serving import serving

PROMPT_TOKENS = 32
SHAPES = {  # layers, heads, width, context, vocabulary
    "124m": (12, 12, 768, 1024, 50257),
    "10m": (6, 5, 320, 512, 8192),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_model(shape: str) -> GPT2:
    layers, heads, width, context, vocab_size = SHAPES[shape]
    torch.manual_seed(0)
    return GPT2(GPT2Config(vocab_size=vocab_size, context=context, layers=layers, heads=heads, width=width))


def transformers_stream(ours: GPT2, *, precision: str, new_tokens: int) -> float:
    """Tokens per second of one greedy stream of the same model in transformers."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config_to_hf(ours.config, end_of_text=None)))
    theirs.load_state_dict(state_to_hf(ours.state_dict()), strict=False)
    theirs.to(DTYPES[precision]).eval()
    ids = torch.arange(PROMPT_TOKENS)[None]
    length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    greedy = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    seconds = [timed(lambda: theirs.generate(ids, **length, **greedy)) for _ in range(4)]
    return new_tokens / statistics.median(seconds[1:])


def main() -> None:
    given = options(
        __doc__, shape="124m", precision="fp32", clients=[1, 16], requests=3, new_tokens=128, slots=16
    )  # fmt: skip
    model, rows = random_model(given.shape), []
    stream = transformers_stream(model, precision=given.precision, new_tokens=given.new_tokens)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, Path(folder), tokenizer=tokenizer_of(model.config.vocab_size))
        chosen = ("--slots", given.slots, "--queue", 1000, "--precision", given.precision)
        with (
            serving(folder, "--name", "fast", *chosen) as service,
            ProcessPoolExecutor(1, spawn, initializer=os.nice, initargs=(19,)) as client,
        ):
            for number in given.clients:
                found = client.submit(ask, service.url, number, given, model.config.vocab_size).result()
                rows.append({"clients": number, **found, "over_stream": found["tokens_per_second"] / stream})
    report("serve", precision=given.precision, transformers_stream=stream, served=rows)


def ask(url: str, clients: int, given: argparse.Namespace, vocab_size: int) -> dict[str, float]:
    """Tokens per second of all clients together; p50 and p99 of the seconds until the first token and the end."""
    return asyncio.run(_ask(url, clients, given, vocab_size))


async def _ask(url: str, clients: int, given: argparse.Namespace, vocab_size: int) -> dict[str, float]:
    chance = random.Random(0)

    async def requests(number: int) -> list[tuple[float, float]]:
        prompts = [[chance.randrange(vocab_size - 1) for _ in range(PROMPT_TOKENS)] for _ in range(number)]
        return [await _stream(http, prompt, given.new_tokens) for prompt in prompts]

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(requests(1) for _ in range(clients)))
        began = time.perf_counter()
        answers = await asyncio.gather(*(requests(given.requests) for _ in range(clients)))
        seconds = time.perf_counter() - began
    times = [each for answer in answers for each in answer]
    return {"tokens_per_second": len(times) * given.new_tokens / seconds, **percentiles(times)}


async def _stream(http: aiohttp.ClientSession, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Send one request; the seconds until its first token and until its end."""
    asked = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first, reason = time.perf_counter(), 0.0, None
    async with http.post("/v1/completions", json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                reason = json.loads(line.removeprefix(b"data: "))["choices"][0]["finish_reason"]
    if reason != "length":
        raise SystemExit(f"the service ended an answer early: {reason}")
    return first, time.perf_counter() - began


def percentiles(times: list[tuple[float, float]]) -> dict[str, float]:
    return {
        f"{name}_p{share}": percentile(seconds, share / 100)
        for name, seconds in zip(("first_token", "whole"), zip(*times, strict=True), strict=True)
        for share in (50, 99)
    }


if __name__ == "__main__":
    main()
