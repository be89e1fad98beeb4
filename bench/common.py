"""What every benchmark shares: options, medians, turns, one JSON object on stdout, a little text."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from cuadrilla.config import Config
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.host.facts import read_environment
from cuadrilla.runfile import resolve


def options(description: str | None, **named: Any) -> argparse.Namespace:
    """`name=default`: an option, of several values where the default is a list. `name=type`: an argument that must be
    given, once or (`[type]`) several times."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in named.items():
        several = isinstance(given, list)
        one = given[0] if several else given
        if isinstance(one, type):
            parser.add_argument(name, type=one, nargs="+" if several else None)
        elif isinstance(one, bool):
            parser.add_argument("--" + name.replace("_", "-"), action="store_true")
        else:
            nargs = "+" if several else None
            parser.add_argument("--" + name.replace("_", "-"), type=type(one), default=given, nargs=nargs)
    return parser.parse_args()


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def ratios(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of a / b, pair by pair."""
    return summary([x / y for x, y in zip(a, b, strict=True)])


def report(name: str, **fields: Any) -> None:
    """The result, with versions, processor, threads and the load of the last minutes."""
    environment = read_environment()
    machine = {
        "cpu": environment["cpu"],
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "python": environment["python"],
        "torch": torch.__version__,
        "transformers": environment["packages"].get("transformers"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    print(json.dumps({"benchmark": name, "machine": machine, **fields}, indent=1))


def stories(folder: Path, *, number: int) -> None:
    """A data folder of so many of the built-in stories."""
    prepare([f"cuentos:{number}"], out=folder, options=PrepareOptions(vocab=512))


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """The bytes, the end of a text, and tokens that no text has: so many in all."""
    tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<unused {number}>" for number in range(len(tokens), vocab_size)]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    return Tokenizer(inner.to_str().encode())


def configure(text: str, *sets: str) -> Config:
    return resolve(text, sets=sets).config


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call, everything on the device included."""
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turns(runs: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each in so many rounds, every other one backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            seconds[name].append(timed(runs[name]))
    return seconds
