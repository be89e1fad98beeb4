"""A first training of a small text with nothing tuned, and how long a plain loop needs to the same held-out loss.

    python -m bench.plain QUIJOTE [--characters 0] [--tokens 300000] [--rates 0.0005 0.001 0.002] [--batches 4 8 16]
        [--seeds 3]

Ours: `gpt2-micro` for so many tokens, all other settings left open. Plain: the GPT-2 of `bench.kernels`, fp32, AdamW
(betas 0.9 and 0.95, weight decay 0.1, clipped at 1) with a constant rate after a warm-up of 50 steps, for each rate and
batch of sequences as long as ours; it is measured on the same held-out sequences after each tenth of our tokens, until
it is as good, or for at most `--patience` times our tokens. Seconds are of training, ours with all that is around it;
CPU seconds are surer where other work runs. Prints one JSON object; `ratio`: our CPU seconds by those of the plain
setting that is the best for this seed, and the median of all seeds.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.common import report
from bench.kernels import PlainGPT2
from bench.little import Text, options, text_of
from cuadrilla.data.loader import UnitLoader
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.model.language import NATS_PER_BIT, LanguageTask
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_config
from cuadrilla.train.setup import make_task

LOOKS = 10
EVALUATION_SEQUENCES = 16
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Of one plain training: tokens and seconds until it was as good as ours (`reached`) or had read enough."""

    rate: float
    batch: int
    reached: bool
    tokens: int
    seconds: float
    cpu_seconds: float
    bits_per_byte: float


def held_out(model: PlainGPT2, task: LanguageTask) -> float:
    """Bits per byte of the whole held-out split."""
    data, split = task.data("val"), task.manifest.splits["val"]
    model.eval()
    with torch.no_grad():
        sums = [
            model.loss(*stacked(task, range(first, min(first + EVALUATION_SEQUENCES, len(data)))))
            for first in range(0, len(data), EVALUATION_SEQUENCES)
        ]
    model.train()
    nats = float(torch.stack(sums).sum()) / (len(data) * task.defaults.length)
    return nats / NATS_PER_BIT * split.num_tokens / split.num_bytes


def stacked(task: LanguageTask, numbers: range) -> tuple[Tensor, Tensor]:
    items = [task.data("val")[number] for number in numbers]
    ids, targets = ([torch.from_numpy(item[name]) for item in items] for name in ("ids", "targets"))
    return torch.stack(ids), torch.stack(targets)


def plain(
    task: LanguageTask, *, rate: float, batch: int, seed: int, target: float, tokens: int, patience: float
) -> Plain:
    """Train until the held-out loss is as low as `target`."""
    torch.manual_seed(seed)
    model = PlainGPT2(task.model().config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    loader = UnitLoader(task.data("train"), seed=seed, unit_sequences=batch, device=CPU)
    round_tokens, done, steps = batch * task.defaults.length, 0, 0
    seconds = cpu_seconds = 0.0
    bits = float("inf")
    while bits > target and done < patience * tokens:
        goal, began, began_cpu = done + tokens / LOOKS, time.perf_counter(), time.process_time()
        while done < goal:
            found = loader.batch(loader.indices([steps]))
            loss = model.loss(found["ids"], found["targets"]) / round_tokens
            torch.autograd.backward([loss])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
            done, steps = done + round_tokens, steps + 1
        seconds += time.perf_counter() - began
        cpu_seconds += time.process_time() - began_cpu
        bits = held_out(model, task)
    return Plain(
        rate=rate, batch=batch, reached=bits <= target, tokens=done, seconds=seconds, cpu_seconds=cpu_seconds,
        bits_per_byte=bits,
    )  # fmt: skip


def ours(text: Text, *, tokens: int, seed: int) -> tuple[dict[str, Any], LanguageTask]:
    """A training with nothing set but its length, and its task."""
    began = time.process_time()
    trained = text.train(sets=[f"train.tokens={tokens}"], seed=seed, settled=())
    cpu_seconds = time.process_time() - began
    config = read_run_config(RunDir(trained.run))
    task = make_task(config, trained.run)
    assert isinstance(task, LanguageTask)
    chosen = {"context": config.model.context, "batch": config.train.batch_sequences}
    found = {"seconds": trained.seconds, "cpu_seconds": cpu_seconds, "bits_per_byte": trained.bits_per_byte}
    return {**chosen, **found}, task


def compare(text: Text, arguments: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    own, task = ours(text, tokens=arguments.tokens, seed=seed)
    plains = [
        plain(
            task, rate=rate, batch=batch, seed=seed, target=own["bits_per_byte"], tokens=arguments.tokens,
            patience=arguments.patience,
        )
        for rate, batch in product(arguments.rates, arguments.batches)
    ]  # fmt: skip
    plains.sort(key=lambda one: (not one.reached, one.cpu_seconds))
    ratio = own["cpu_seconds"] / plains[0].cpu_seconds if plains[0].reached else None
    return {"ours": own, "plain": [vars(one) for one in plains], "ratio": ratio}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0005, 0.001, 0.002])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--patience", type=float, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    with text_of(arguments) as text:
        found = [compare(text, arguments, seed=seed) for seed in range(arguments.seeds)]
        ratios = [one["ratio"] for one in found if one["ratio"] is not None]
        report(
            "plain",
            train_tokens=text.num_tokens,
            tokens=arguments.tokens,
            seeds=found,
            ratio=statistics.median(ratios) if ratios else None,
        )


if __name__ == "__main__":
    main()
