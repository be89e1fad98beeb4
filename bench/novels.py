"""What a model learns from real books: bits per byte on held-out ones, ours beside transformers with AdamW.

    python -m bench.novels FOLDER [--size mini] [--tokens 1000000] [--every 15]

FOLDER holds one text file for each book; every fifteenth is held out whole, the tokenizer does not see it either. Both
train the same shape on the same sequences in the same order, each with the best learning rate of its sweep (four
rates). Ours as a user gets it: Muon + AdamW, the precision it chooses, its schedule. Theirs: GPT2LMHeadModel, fp32, its
loss, clipping at 1, `torch.optim.AdamW` (0.9, 0.95, weight decay 0.1), a warm-up of 2 % and a cosine to a tenth.
`equal_tokens`: theirs with as many tokens. `equal_time`: theirs with as many as it can do in our seconds, at its best
rate, with a schedule of that length. All are measured by the same code in fp32, after their training.
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config as PeerConfig
from transformers import GPT2LMHeadModel

from bench.common import configure, report
from cuadrilla.config import Config
from cuadrilla.crew.local import run_local
from cuadrilla.data.loader import UnitLoader
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.hf import config_to_hf, state_from_hf
from cuadrilla.model.language import LanguageTask
from cuadrilla.rundir import RunDir
from cuadrilla.train.eval_data import read_texts
from cuadrilla.train.eval_metrics import text_figure
from cuadrilla.train.setup import assemble, make_task

MUON_RATES = (0.005, 0.01, 0.02, 0.04)
ADAMW_RATES = (5e-4, 1e-3, 2e-3, 4e-3)
BATCH = 8
VOCABULARY = 8192

RUN = """
[data]
folder = "{data}"
[model]
preset = "{size}"
[train]
tokens = {tokens}
batch_sequences = {batch}
unit_sequences = {batch}
[optim]
kind = "muon"
lr = {rate}
[checkpoint]
every_seconds = 0
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 1
[sample]
tokens = 0
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    rate: float
    tokens: int
    seconds: float
    bits_per_byte: float


class Books:
    """The prepared text of some books, and the text of the others."""

    def __init__(self, folder: Path, *, every: int, work: Path) -> None:
        names = sorted(path for path in folder.iterdir() if path.suffix == ".txt")
        self.held_out = names[every - 1 :: every]
        (work / "train").mkdir()
        for path in set(names) - set(self.held_out):
            shutil.copy(path, work / "train")
        self.data = work / "data"
        prepare([str(work / "train")], out=self.data, options=PrepareOptions(vocab=VOCABULARY, val_fraction=0.01))
        self._texts = [text for path in self.held_out for text in read_texts(path)]

    def bits_per_byte(self, model: GPT2, task: LanguageTask) -> float:
        model.compute_dtype = torch.float32
        return text_figure(model.eval(), task.tokenizer, self._texts, of="held-out books").value


def ours(books: Books, *, size: str, tokens: int, rate: float) -> Result:
    config = configure(RUN.format(data=books.data, size=size, tokens=tokens, batch=BATCH, rate=rate))
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name))
        task = make_task(config, run.path)
        context = assemble(config, run, task=task, sinks=[])
        began = time.perf_counter()
        outcome = run_local(context)
        seconds = time.perf_counter() - began
        assert isinstance(context.model, GPT2)
        assert isinstance(task, LanguageTask)
        score = books.bits_per_byte(context.model, task)
    return Result(rate=rate, tokens=outcome.tokens, seconds=seconds, bits_per_byte=score)


def theirs(books: Books, *, size: str, tokens: int, rate: float) -> Result:
    config = configure(RUN.format(data=books.data, size=size, tokens=tokens, batch=BATCH, rate=0.01))
    task = make_task(config, books.data)
    assert isinstance(task, LanguageTask)
    mine = task.model()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(PeerConfig(**config_to_hf(mine.config, end_of_text=None), use_cache=False))
    steps = -(-tokens // (BATCH * task.defaults.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps=steps))
    model.train()
    began = time.perf_counter()
    for ids in sequences(task, config, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    mine.load_state_dict(state_from_hf(model.state_dict()))
    score = books.bits_per_byte(mine, task)
    return Result(rate=rate, tokens=steps * BATCH * task.defaults.length, seconds=seconds, bits_per_byte=score)


def factor(step: int, *, steps: int) -> float:
    """Of the learning rate: a warm-up of 2 %, then a cosine to a tenth."""
    warmup = max(1, steps // 50)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def sequences(task: LanguageTask, config: Config, *, steps: int) -> Iterator[torch.Tensor]:
    """Batches in the order in which our run sees them."""
    loader = UnitLoader(
        task.data("train"), seed=config.run.seed, unit_sequences=BATCH, device=torch.device("cpu")
    )  # fmt: skip
    for unit in range(steps):
        yield loader.batch(loader.indices([unit]))["ids"].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=15, help="which books are held out")
    arguments = parser.parse_args()
    size, tokens = arguments.size, arguments.tokens
    with tempfile.TemporaryDirectory() as work:
        books = Books(arguments.folder, every=arguments.every, work=Path(work))
        swept: dict[str, list[Result]] = {"ours": [], "theirs": []}
        for muon, adamw in zip(MUON_RATES, ADAMW_RATES, strict=True):  # in turn: the machine's load is shared
            swept["ours"].append(ours(books, size=size, tokens=tokens, rate=muon))
            print("ours:", swept["ours"][-1], file=sys.stderr)
            swept["theirs"].append(theirs(books, size=size, tokens=tokens, rate=adamw))
            print("theirs:", swept["theirs"][-1], file=sys.stderr)
        best = {name: min(results, key=lambda result: result.bits_per_byte) for name, results in swept.items()}
        speed = best["theirs"].tokens / best["theirs"].seconds
        in_our_time = theirs(
            books, size=size, tokens=int(speed * best["ours"].seconds), rate=best["theirs"].rate
        )  # fmt: skip
        fields: dict[str, Any] = {
            "size": size,
            "held_out": [path.name for path in books.held_out],
            "ours": asdict(best["ours"]),
            "equal_tokens": asdict(best["theirs"]),
            "equal_time": asdict(in_our_time),
            "sweep": {name: [asdict(result) for result in results] for name, results in swept.items()},
        }
        report("novels", **fields)


if __name__ == "__main__":
    main()
