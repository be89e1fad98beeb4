"""The service under load: what each client gets beside others, and how fast, beside one stream of transformers.

    python -m bench.serve --check RUN [--clients 1 4 16 64]
    python -m bench.serve --speed [--shape 124m] [--precision fp32] [--clients 1 16]
    python -m bench.serve --overload 60 [--times 4] [--queue 4]

`--check`: clients at random join, leave in mid-stream and cancel; greedy tokens, those that a seed draws and log
probabilities are compared with what the model gives each request alone. Of a token that differs the margin of the best
two is printed (`flips`); only ties within 1e-5 are excused. In fp32.

`--speed`: a model of random weights in a process of its own, asked by `cuadrilla load` in another one; `over_stream`:
tokens a second of all clients over those of one stream of transformers in the same precision, measured before, alone.

`--overload SECONDS`: requests that arrive at random, `--times` as many as the service answers when it is never idle;
times of those that it admits over those of a single client, answers by kind, and its memory before and after.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
import transformers

from bench.common import report, tokenizer_of
from bench.gateway import COMMAND, started
from bench.generate import DTYPES, SHAPES, random_model
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.model.generate import for_inference, generate
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.hf import config_to_hf, save_hf, state_to_hf
from cuadrilla.model.sampling import Sampling
from cuadrilla.serve.answers import Spelling
from cuadrilla.train.trained import LanguageModel, open_model

LOW_PRIORITY = ["nice", "-n", "19"]
"""For the client, which shares the cores with the service."""
EXCUSED = 1e-5
MOST_TOKENS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, metavar="RUN")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="124m")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--overload", type=float, metavar="SECONDS", default=0)
    parser.add_argument("--times", type=float, default=4)
    parser.add_argument("--queue", type=int, default=-1, help="texts that may wait, with --overload")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.check:
        found["check"] = check(arguments.check, clients=arguments.clients, requests=arguments.requests)
    if arguments.speed:
        found["speed"] = speed(arguments)
    if arguments.overload:
        found["overload"] = overload(arguments)
    report("serve", **found)


def written(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(folder / "own-tokenizer.json")
    return folder / "own-tokenizer.json"


# -- what each gets ----------------------------------------------------------------------------------------------------


def check(run: Path, *, clients: list[int], requests: int) -> list[dict[str, Any]]:
    opened = open_model(run, device="cpu")
    opened.model.compute_dtype = torch.float32
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_hf(opened.model, Path(folder), tokenizer_path=written(opened.tokenizer, Path(folder)))
        with started("serve", f"checked={folder}", "--slots", 16, "--queue", 1000, "--precision", "fp32") as url:
            return [asyncio.run(_with(number, url, opened, requests=requests)) for number in clients]


async def _with(number: int, url: str, opened: LanguageModel, *, requests: int) -> dict[str, Any]:
    counts: dict[str, Any] = {"requests": 0, "left": 0, "tokens": 0, "unexcused": 0, "flips": [], "worst_logprob": 0.0}
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(
            *(_client(session, opened, random.Random(1000 * number + each), requests, counts) for each in range(number))
        )
        async with session.get("/readyz") as answer:
            counts["busy_afterwards"] = (await answer.json())["busy"]
    return {"clients": number, **counts}


async def _client(
    session: aiohttp.ClientSession, opened: LanguageModel, chance: random.Random, requests: int, counts: dict[str, Any]
) -> None:
    size, end = opened.model.config.vocab_size, opened.tokenizer.end_of_text
    for _ in range(requests):
        prompt = [chance.randrange(size - 1) for _ in range(chance.randint(1, 40))]
        asked = {"prompt": prompt, "max_tokens": chance.randint(1, MOST_TOKENS), "logprobs": 2, "stream": True}
        greedy = chance.random() < 0.6
        drawn = {"temperature": 0.9, "top_p": chance.choice([1.0, 0.9]), "seed": chance.randrange(2**40)}
        asked |= {"temperature": 0} if greedy else drawn
        leaves = chance.randint(1, MOST_TOKENS) if chance.random() < 0.3 else -1
        got, scores = await _stream(session, asked, leaves=leaves)
        sampling = Sampling(
            temperature=float(asked["temperature"]), top_p=float(asked.get("top_p", 1.0)),
            seed=int(asked.get("seed", 0)), max_tokens=int(asked["max_tokens"]), stop_ids=(end,),
        )  # fmt: skip
        alone = await asyncio.to_thread(_alone, opened, prompt, sampling)
        counts["requests"] += 1
        counts["left"] += leaves >= 0
        _compare(opened, prompt, alone, got, scores, counts)
        await asyncio.sleep(chance.random() * 0.05)


async def _stream(
    session: aiohttp.ClientSession, asked: dict[str, Any], *, leaves: int
) -> tuple[list[str], list[float]]:
    """Spelled tokens with their log probabilities; after `leaves` tokens the connection is closed."""
    tokens: list[str] = []
    scores: list[float] = []
    async with session.post("/v1/completions", json=asked) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                told = json.loads(data)["choices"][0]["logprobs"]
                tokens += told["tokens"]
                scores += told["token_logprobs"]
            if 0 <= leaves <= len(tokens):
                answer.close()
                break
    return tokens, scores


def _alone(opened: LanguageModel, prompt: list[int], sampling: Sampling) -> list[int]:
    return list(generate(for_inference(opened.model), prompt, sampling=sampling))


def _compare(
    opened: LanguageModel,
    prompt: list[int],
    alone: list[int],
    got: list[str],
    scores: list[float],
    counts: dict[str, Any],
) -> None:
    spelling = Spelling(opened.tokenizer)
    expected = [spelling.spell(token) for token in alone][: len(got)]
    same = next((place for place, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), len(got))
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(opened.model(torch.tensor([prompt + alone[:same]]))[0].float(), -1)
    for place in range(min(same, len(expected))):
        exact = float(logprobs_TV[len(prompt) - 1 + place, alone[place]])
        counts["worst_logprob"] = max(counts["worst_logprob"], abs(exact - scores[place]))
    counts["tokens"] += min(same, len(expected))
    if same < len(got):
        best = logprobs_TV[len(prompt) - 1 + same].topk(2).values.tolist()
        counts["flips"].append(best[0] - best[1])
        counts["unexcused"] += best[0] - best[1] > EXCUSED


# -- how fast ----------------------------------------------------------------------------------------------------------


@contextmanager
def random_weights(model: GPT2) -> Iterator[Path]:
    """A folder that holds them, in Hugging Face's layout."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_path = written(tokenizer_of(model.config.vocab_size), Path(folder))
        save_hf(model, Path(folder), tokenizer_path=tokenizer_path)
        yield Path(folder)


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    model = random_model(arguments.shape, seed=0)
    with random_weights(model) as folder:
        stream = _transformers(model, arguments)
        rows = []
        with started(
            "serve", f"fast={folder}", "--slots", arguments.slots, "--queue", 1000, "--precision", arguments.precision
        ) as url:
            for number in arguments.clients:
                found = _load(url, number, arguments)
                rows.append({"clients": number, **found, "over_stream": found["tokens_per_second"] / stream})
    return {"transformers_stream": stream, "precision": arguments.precision, "served": rows}


def overload(arguments: argparse.Namespace) -> dict[str, Any]:
    with random_weights(random_model(arguments.shape, seed=0)) as folder:
        options = ["--slots", arguments.slots, "--queue", arguments.queue, "--precision", arguments.precision]
        with started("serve", f"fast={folder}", *options) as url:
            alone = _load(url, 1, arguments)
            full = _load(url, arguments.slots, arguments)
            rate = arguments.times * full["tokens_per_second"] / arguments.new_tokens
            memory = _memory_bytes(url)
            stage = stage_of(
                url, arguments, {"--rate": f"{rate:.3f}", "--seconds": arguments.overload, "--warm-up": 5}
            )  # fmt: skip
            memory_after = _memory_bytes(url)
    times = {name: stage[f"{name}_seconds"] for name in ("ttft", "itl", "e2e")}
    return {
        "precision": arguments.precision,
        "rate": rate,
        "answered": stage["counts"]["answered"],
        "failed": stage["errors"],
        "tokens_per_second": {"alone": alone["tokens_per_second"], "full": full["tokens_per_second"],
                              "overloaded": stage["tokens_per_second"]},
        "p99": {name: [alone[f"{name}_p99"], full[f"{name}_p99"], found["p99"]] for name, found in times.items()},
        "p99_over_alone": {name: found["p99"] / alone[f"{name}_p99"] for name, found in times.items()},
        "memory_bytes": [memory, memory_after],
    }  # fmt: skip


def _memory_bytes(url: str) -> int:
    """Of the process that listens there."""
    port = int(url.rpartition(":")[2])
    (pid,) = {each.pid for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port}
    return int(psutil.Process(pid).memory_info().rss)


def _transformers(ours: GPT2, arguments: argparse.Namespace) -> float:
    """Tokens a second of one stream, median of three."""
    transformers.logging.set_verbosity_error()
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config_to_hf(ours.config, end_of_text=None)))
    theirs.load_state_dict(state_to_hf(ours.state_dict()), strict=False)
    theirs.to(DTYPES[arguments.precision]).eval()
    prompt = torch.randint(ours.config.vocab_size, (1, 32))
    rates = []
    for _ in range(4):
        began = time.perf_counter()
        theirs.generate(
            prompt, max_new_tokens=arguments.new_tokens, min_new_tokens=arguments.new_tokens, do_sample=False
        )
        rates.append(arguments.new_tokens / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def _load(url: str, clients: int, arguments: argparse.Namespace) -> dict[str, Any]:
    asked = {"--clients": clients, "--requests": max(arguments.requests * clients, 4), "--warm-up": 2}
    stage = stage_of(url, arguments, asked)
    seconds = {
        f"{name}_{part}": stage[f"{name}_seconds"][part] for name in ("ttft", "itl", "e2e") for part in ("p50", "p99")
    }
    return {"tokens_per_second": stage["tokens_per_second"], "failed": stage["counts"]["failed"], **seconds}


def stage_of(url: str, arguments: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    """What `cuadrilla load` finds, in a process of its own."""
    asked = asked | {"--prompt-tokens": 32, "--max-tokens": arguments.new_tokens, "--temperature": 0}
    options = [word for option in asked.items() for word in option]
    command = [*LOW_PRIORITY, *COMMAND, "load", url, *options, "--fields", '{"ignore_eos": true}', "--json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    (stage,) = json.loads(done.stdout)["stages"]
    found: dict[str, Any] = stage
    return found


if __name__ == "__main__":
    main()
