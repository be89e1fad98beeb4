"""The gateway beside the services themselves: requests a second, and what it adds to the time of an answer.

    python -m bench.gateway [--replicas 1 3] [--rounds 7] [--requests 300] [--clients 16] [--new-tokens 4]

Services of a tiny model, and a gateway for each number of them, are processes; this one asks them. A round asks the
first service directly, then by way of each gateway, so that whatever else the machine does meets all of them; figures
are of the rounds. `one_ms`: of a single client that waits for each answer, in one piece (`whole`) and
until the first event of a stream (`first`), p50 and p99; `added_ms`: the gateway's less the direct one of the same
round. `requests_per_second`: of `--clients` at once, whole answers; `of_direct`: over the direct ones of that round.
"""

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from bench.common import ratios, report, summary, tokenizer_of
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import save_hf

COMMAND = [sys.executable, "-m", "cuadrilla"]
VOCABULARY, CONTEXT = 300, 128
WARM_UP = 20
KINDS = ("whole", "first")
DIRECT = "direct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=300, help="of each kind in a round")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_tiny(Path(folder))
        room = ["--slots", arguments.clients, "--queue", 4 * arguments.clients]
        urls = [stack.enter_context(started("serve", f"tiny={folder}", *room)) for _ in range(max(arguments.replicas))]
        places = {DIRECT: urls[0]}
        for number in arguments.replicas:
            places[f"gateway, {number}"] = stack.enter_context(started("gateway", *urls[:number]))
        found = asyncio.run(measure(places, arguments))
    report("gateway", clients=arguments.clients, new_tokens=arguments.new_tokens, places=summarised(found))


@contextmanager
def started(verb: str, *arguments: object) -> Iterator[str]:
    """The address of `cuadrilla VERB ARGUMENTS`, while it runs."""
    command = [*COMMAND, verb, *map(str, arguments), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                if address := re.search(r"^(?:serving|gateway) +(http://\S+)", line):
                    yield address[1]
                    break
            else:
                raise SystemExit(f"cuadrilla {verb} did not start")
        finally:
            process.terminate()


def save_tiny(folder: Path) -> None:
    tokenizer_of(VOCABULARY).save(folder / "own-tokenizer.json")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, context=CONTEXT, layers=1, heads=1, width=16)
    save_hf(GPT2(config), folder, tokenizer_path=folder / "own-tokenizer.json")


# -- asking ------------------------------------------------------------------------------------------------------------

Found = dict[str, dict[str, list[float]]]
"""By place and figure, a number of each round."""


async def measure(places: dict[str, str], arguments: argparse.Namespace) -> Found:
    asked = {"prompt": "Hola", "max_tokens": arguments.new_tokens, "temperature": 0, "ignore_eos": True}
    found: Found = {place: {} for place in places}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for url in places.values():
            await until_ready(session, url)
            for _ in range(WARM_UP):
                await answer_seconds(session, url, asked, kind="first")
        for _ in range(arguments.rounds):
            for place, url in places.items():
                for name, value in (await one_round(session, url, asked, arguments)).items():
                    found[place].setdefault(name, []).append(value)
    return found


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    """A gateway has to hear of all of its services first."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/readyz") as answer:
                said = await answer.json()
            if said["status"] == "ready" and all(one["status"] == "ready" for one in said.get("replicas", ())):
                return
            await asyncio.sleep(0.1)


async def one_round(
    session: aiohttp.ClientSession, url: str, asked: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, float]:
    figures = {}
    for kind in KINDS:
        seconds = [await answer_seconds(session, url, asked, kind=kind) for _ in range(arguments.requests)]
        figures[f"{kind}_p50"], figures[f"{kind}_p99"] = (1000 * part for part in percentiles(seconds))
    left = iter(range(arguments.requests))

    async def client() -> None:
        for _ in left:
            await answer_seconds(session, url, asked, kind="whole")

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(arguments.clients)))
    figures["requests_per_second"] = arguments.requests / (time.perf_counter() - began)
    return figures


async def answer_seconds(session: aiohttp.ClientSession, url: str, asked: dict[str, Any], *, kind: str) -> float:
    """Until it is whole, or until the first event of a stream, of which the rest is read all the same."""
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json={**asked, "stream": kind == "first"}) as answer:
        if answer.status != 200:
            raise SystemExit(f"{url} has answered {answer.status}: {await answer.text()}")
        if kind == "first":
            await answer.content.readuntil(b"\n\n")
            seconds = time.perf_counter() - began
            await answer.read()
            return seconds
        await answer.read()
    return time.perf_counter() - began


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The middle, and what one of a hundred passes."""
    ordered = sorted(seconds)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def summarised(found: Found) -> dict[str, Any]:
    direct = found[DIRECT]
    places: dict[str, Any] = {}
    for place, figures in found.items():
        each = {name: values for name, values in figures.items() if name != "requests_per_second"}
        places[place] = {
            "requests_per_second": summary(figures["requests_per_second"]),
            "one_ms": {name: summary(values) for name, values in each.items()},
        }
        if place != DIRECT:
            places[place]["of_direct"] = ratios(figures["requests_per_second"], direct["requests_per_second"])
            places[place]["added_ms"] = {
                name: summary([with_it - without for with_it, without in zip(values, direct[name], strict=True)])
                for name, values in each.items()
            }
    return places


if __name__ == "__main__":
    main()
