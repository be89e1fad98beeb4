"""Shared by the benchmarks: command-line options, timing in turns, medians, the JSON report on stdout, small data."""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.host.facts import read_environment

SETTINGS: dict[str, Any] = {
    "train.unit_sequences": 1,
    "train.precision": "fp32",
    "train.threads": 1,
    "optim.kind": "adamw",
    "evaluate.every_tokens": 10**12,
    "sample.tokens": 0,
}


def options(description: str | None, **named: Any) -> argparse.Namespace:
    """Parse the command line. `name=default` declares `--name`: a list takes several values, `False` makes a flag.
    `name=type` declares a required argument of one value, `name=[type]` one of several values."""
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
    """Median, minimum, maximum and count."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: of ten values, p95 is the largest."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def ratios(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """The summary of a / b, which is computed pair by pair."""
    return summary([x / y for x, y in zip(a, b, strict=True)])


def report(name: str, **fields: Any) -> None:
    """Print the result as JSON, with the versions of the software, the processor, the threads and the load averages."""
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
    """Prepare a data folder with this number of the built-in stories."""
    prepare([f"cuentos:{number}"], out=folder, options=PrepareOptions(vocab=512))


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer: the end of text, the 256 bytes, and unused tokens up to the size of the vocabulary."""
    tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<unused {number}>" for number in range(len(tokens), vocab_size)]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    return Tokenizer(inner.to_str().encode())


def run_text(settings: Mapping[str, Any]) -> str:
    """The text of a run file with these settings, `section.key`, and those that the benchmarks have in common."""
    return "".join(f"{key} = {json.dumps(value, default=str)}\n" for key, value in (SETTINGS | settings).items())


def timed(function: Callable[[], object]) -> float:
    """Seconds that one call takes, until a GPU has finished its work, too."""
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turns(runs: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in each round. The runs take turns, and every other round goes through them in reverse."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            seconds[name].append(timed(runs[name]))
    return seconds
