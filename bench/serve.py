"""The service beside one stream of transformers: tokens a second of one client and of several, and the first token.

    python -m bench.serve [--shape 124m] [--precision fp32] [--clients 1 16]

A model of random weights is served by a process of its own and asked by another one at the lowest priority, which
shares the cores with it. Each client sends prompts of 32 random tokens, one after the other, and reads the answers as
streams; its first request is not counted. `over_stream`: tokens a second of all clients over those of one stream of
transformers in the same precision, measured before, alone.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import torch
import transformers

from bench.common import report, tokenizer_of
from bench.generate import DTYPES, SHAPES, random_model
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.hf import config_to_hf, save_hf, state_to_hf

PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="124m")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=16)
    arguments = parser.parse_args()
    model = random_model(arguments.shape, seed=0)
    stream = transformers_stream(model, arguments)
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with served(model, arguments) as url, ProcessPoolExecutor(1, spawn, initializer=os.nice, initargs=(19,)) as client:
        for number in arguments.clients:
            found = client.submit(ask, url, number, arguments, model.config.vocab_size).result()
            rows.append({"clients": number, **found, "over_stream": found["tokens_per_second"] / stream})
    report("serve", precision=arguments.precision, transformers_stream=stream, served=rows)


def transformers_stream(ours: GPT2, arguments: argparse.Namespace) -> float:
    """Tokens a second of one stream, median of three."""
    transformers.logging.set_verbosity_error()
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config_to_hf(ours.config, end_of_text=None)))
    theirs.load_state_dict(state_to_hf(ours.state_dict()), strict=False)
    theirs.to(DTYPES[arguments.precision]).eval()
    prompt = torch.randint(ours.config.vocab_size, (1, PROMPT_TOKENS))
    length = {"max_new_tokens": arguments.new_tokens, "min_new_tokens": arguments.new_tokens}
    rates = []
    for _ in range(4):
        began = time.perf_counter()
        theirs.generate(prompt, do_sample=False, **length)
        rates.append(arguments.new_tokens / (time.perf_counter() - began))
    return statistics.median(rates[1:])


@contextmanager
def served(model: GPT2, arguments: argparse.Namespace) -> Iterator[str]:
    """The address of `cuadrilla serve` with this model, while it runs."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_path = Path(folder) / "own-tokenizer.json"
        tokenizer_of(model.config.vocab_size).save(tokenizer_path)
        save_hf(model, Path(folder), tokenizer_path=tokenizer_path)
        options = ["--slots", arguments.slots, "--queue", 1000, "--precision", arguments.precision]
        command = [sys.executable, "-m", "cuadrilla", "serve", f"fast={folder}", *options, "--port", "0"]
        with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                for line in process.stderr:
                    print(line, end="", file=sys.stderr)
                    if address := re.search(r"^serving +(http://\S+)", line):
                        yield address[1]
                        break
                else:
                    raise SystemExit("cuadrilla serve did not start")
            finally:
                process.terminate()


def ask(url: str, clients: int, arguments: argparse.Namespace, vocab_size: int) -> dict[str, float]:
    """Tokens a second of all clients together; seconds until the first token and until the end, p50 and p99."""
    return asyncio.run(_ask(url, clients, arguments, vocab_size))


async def _ask(url: str, clients: int, arguments: argparse.Namespace, vocab_size: int) -> dict[str, float]:
    chance = random.Random(0)
    times: list[tuple[float, float]] = []

    async def requests(number: int) -> list[tuple[float, float]]:
        prompts = [[chance.randrange(vocab_size - 1) for _ in range(PROMPT_TOKENS)] for _ in range(number)]
        return [await _stream(http, prompt, arguments.new_tokens) for prompt in prompts]

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(requests(1) for _ in range(clients)))
        began = time.perf_counter()
        for found in await asyncio.gather(*(requests(arguments.requests) for _ in range(clients))):
            times += found
        seconds = time.perf_counter() - began
    return {"tokens_per_second": len(times) * arguments.new_tokens / seconds, **percentiles(times)}


async def _stream(http: aiohttp.ClientSession, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Seconds until the first token, and until the end."""
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
    found = {}
    for name, seconds in zip(("first_token", "whole"), map(sorted, zip(*times, strict=True)), strict=True):
        found[f"{name}_p50"] = statistics.median(seconds)
        found[f"{name}_p99"] = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return found


if __name__ == "__main__":
    main()
