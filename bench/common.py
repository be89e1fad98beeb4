"""What every benchmark shares: medians, the machine it ran on, one JSON object on stdout, data of random tokens."""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from cuadrilla.config import Config
from cuadrilla.crew.local import run_local
from cuadrilla.data.folder import TOKENIZER, Manifest, TokenWriter, dtype_for, write_manifest
from cuadrilla.data.tokenizer import END_OF_TEXT, Tokenizer
from cuadrilla.host.facts import read_environment
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import resolve
from cuadrilla.train.setup import assemble, make_task
from cuadrilla.train.sinks import Scalars, Sink


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def ratios(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of a / b, pair by pair."""
    return summary([x / y for x, y in zip(a, b, strict=True)])


def report(name: str, **fields: Any) -> None:
    """The result, with versions, processor and threads."""
    environment = read_environment()
    machine = {
        "cpu": environment["cpu"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": environment["python"],
        "torch": torch.__version__,
        "transformers": environment["packages"].get("transformers"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    print(json.dumps({"benchmark": name, "machine": machine, **fields}, indent=1))


def random_data(folder: Path, *, vocab_size: int, num_tokens: int) -> None:
    """A data folder of random tokens: speed does not depend on what they mean."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(vocab_size)
    tokenizer.save(folder / TOKENIZER)
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", num_tokens), ("val", num_tokens // 4)):
        writer = TokenWriter(folder, split=split, dtype=dtype_for(vocab_size))
        writer.append(random.integers(0, vocab_size, count))
        splits[split] = writer.close(num_bytes=count * 4, num_documents=1)
    manifest = Manifest(
        tokenizer_sha256=tokenizer.sha256(),
        vocab_size=vocab_size,
        dtype=dtype_for(vocab_size),
        end_of_text=tokenizer.end_of_text,
        splits=splits,
    )
    write_manifest(folder, manifest)


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """The bytes, the end of a text, and tokens that no text has: so many in all."""
    tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<unused {number}>" for number in range(len(tokens), vocab_size)]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    return Tokenizer(inner.to_str().encode())


class Turns(Sink):
    """A sink that lets another program take its turn after each of our steps, and keeps our time per step."""

    def __init__(self, other: Callable[[], float]) -> None:
        """`other` does one step of the peer and returns its seconds."""
        self._other = other
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def log(self, _step: int, scalars: Scalars) -> None:
        self.ours.append(float(scalars["seconds"]))
        self.theirs.append(self._other())


def run_ours(folder: Path, config: Config, turns: Turns) -> None:
    """The product's whole path: task, coordinator, in-process link, loop; without checkpoints on the way."""
    run = RunDir(folder)
    context = assemble(config, run, task=make_task(config, folder), sinks=[turns])
    run_local(context)


def configure(text: str, *sets: str) -> Config:
    return resolve(text, sets=sets).config


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call, everything on the device included."""
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
