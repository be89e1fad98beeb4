"""With what a copy that generates computes on this machine's processor, and what int8 weights cost.

Measured once for each processor, torch, precision and shape of model, and kept beside the choices of trainings
(`kernels.py`, whose invariants hold here too): the products of the model's own matrices with one row and with
`SEVERAL`, and in bf16 attention over keys in bf16.

Invariants
* What is usual stays unless something else is faster by `WORTH_IT`; a second copy of the weights must be worth more.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuadrilla.errors import DataError
from cuadrilla.host.facts import read_facts
from cuadrilla.messages import Message
from cuadrilla.model.generate import TextTokenizer
from cuadrilla.model.gpt2 import GPT2, Linear
from cuadrilla.model.kernels import has_onednn
from cuadrilla.model.language import NATS_PER_BIT
from cuadrilla.model.ready import WAYS, ReadyKernels, ReadyLinear, Way
from cuadrilla.train.kernels import LEAST_WIDTH, WORTH_IT, kept

SEVERAL = 16
"""Rows that are continued at once in the measurement of several."""
COPY_WORTH_IT = 1.1
"""For a way that needs a second copy of the weights in memory."""
MOST_MATRICES = 12
"""Of one shape, that are measured."""
HEAD_ROWS = 8192
"""The head is measured in slices."""
KEYS_LAYERS, KEYS_POSITIONS = 4, 256
SECONDS_FOR_EACH = 0.2
LEAST_ROUNDS, MOST_ROUNDS = 4, 20
FINE_SECONDS, TINY = 1e-6, 1e-9
SCORED_AT_ONCE = 128


@dataclass(frozen=True, kw_only=True)
class InferenceChoice:
    """What a copy computes with; and the seconds of what is usual over each other way's: of one row, of several, and
    with keys in bf16."""

    kernels: ReadyKernels
    usual: ReadyKernels
    ratios: dict[str, dict[str, float]]

    def __str__(self) -> str:
        if not self.ratios:
            return Message("as usual")
        names = {
            "torch": Message("torch's library"),
            "onednn": Message("oneDNN"),
            "packed": Message("oneDNN with packed weights"),
            "narrow": Message("bf16 keys"),
        }
        places = {
            "one": Message("one row"),
            "several": Message("{rows} rows", rows=SEVERAL),
            "keys": Message("attention"),
        }
        told = (
            Message("{place}: {name} {ratio:.2f} times as fast", place=places[place], name=names[name], ratio=ratio)
            for place, ratios in self.ratios.items()
            for name, ratio in ratios.items()
        )
        return Message(
            "as usual ({ratios})" if self.kernels == self.usual else "chosen here ({ratios})",
            ratios=reduce(lambda one, other: Message("{one}, {other}", one=one, other=other), told),
        )


def choose_for_inference(model: GPT2, *, home: Path) -> InferenceChoice:
    """What `for_inference` is to use for such a model. Takes about a second the first time."""
    dtype, device, config = model.compute_dtype, model.transformer.wte.weight.device, model.config
    usual = ReadyKernels.usual(dtype)
    if not has_onednn(device, dtype) or config.width < LEAST_WIDTH:
        return InferenceChoice(kernels=usual, usual=usual, ratios={})
    shape = (config.layers, config.width, config.heads, config.context, config.inner, config.vocab_size)
    parts = (read_facts().cpu.name, torch.__version__, str(dtype), *shape)
    key = " | ".join(map(str, parts))
    parse = partial(_parse, usual=usual)
    return kept(home, section="inference", key=key, measure=lambda: _measured(model, usual=usual), parse=parse)


def _parse(row: Any, *, usual: ReadyKernels) -> InferenceChoice:
    ways: dict[str, Way] = {way: way for way in WAYS}
    kernels = row["kernels"]
    return InferenceChoice(
        kernels=ReadyKernels(
            one=ways[kernels["one"]], several=ways[kernels["several"]], narrow_keys=bool(kernels["narrow_keys"])
        ),
        usual=usual,
        ratios={
            str(place): {str(name): float(ratio) for name, ratio in ratios.items()}
            for place, ratios in row["ratios"].items()
        },
    )


@torch.inference_mode()
def _measured(model: GPT2, *, usual: ReadyKernels) -> InferenceChoice:
    dtype = model.compute_dtype
    random = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where other programs run, and measure those
    products = list(_products(model))
    one, several = (_speeds(products, rows=rows, random=random, dtype=dtype) for rows in (1, SEVERAL))
    kernels = _chosen(one, several, usual=usual, shares=dtype == torch.float32)
    ratios: dict[str, dict[str, float]] = {
        "one": {way: speed / one[usual.one] for way, speed in one.items() if way != usual.one},
        "several": {way: speed / several[usual.several] for way, speed in several.items() if way != usual.several},
    }
    if dtype == torch.bfloat16:
        narrow = _gain_of_narrow_keys(model, random=random)
        ratios["keys"] = {"narrow": narrow}
        kernels = replace(kernels, narrow_keys=narrow >= WORTH_IT)
    torch.set_num_threads(threads)
    return InferenceChoice(kernels=kernels, usual=usual, ratios=ratios)


def _chosen(
    one: Mapping[Way, float], several: Mapping[Way, float], *, usual: ReadyKernels, shares: bool
) -> ReadyKernels:
    """From the speed of each way. `shares`: what is not packed is the model's own memory."""

    def best(speeds: Mapping[Way, float], usually: Way) -> Way:
        fastest = max(WAYS, key=lambda way: speeds[way])
        return fastest if speeds[fastest] >= WORTH_IT * speeds[usually] else usually

    ways = best(one, usual.one), best(several, usual.several)
    if shares or (ways[0] == "packed") == (ways[1] == "packed"):
        return ReadyKernels(one=ways[0], several=ways[1])
    # Two copies of all weights, or the way that is the better one of the two for both.
    losses = {way: max(one[ways[0]] / one[way], several[ways[1]] / several[way]) for way in WAYS}
    both = min(WAYS, key=lambda way: losses[way])
    if losses[both] < COPY_WORTH_IT:
        ways = both, both
    return ReadyKernels(one=ways[0], several=ways[1])


@dataclass(frozen=True)
class Product:
    """A product with one of the model's matrices; `count`: how many of them it stands for."""

    shape: tuple[int, ...]
    count: float
    way: Way
    linear: ReadyLinear


def _products(model: GPT2) -> Iterator[Product]:
    """In the model's order, so that caches hold no more than when all of it is read for a token.

    Of a shape with enough matrices each is tried in one way, of others in all of them.
    """
    head_VC = model.head.weight
    num_rows = min(HEAD_ROWS, len(head_VC))
    slices_RC = [head_VC[start : start + num_rows] for start in range(0, len(head_VC) - num_rows + 1, num_rows)]
    matrices: dict[tuple[int, ...], list[Tensor]] = {}
    for weight_OI in (*slices_RC, *(module.weight for module in model.modules() if isinstance(module, Linear))):
        matrices.setdefault(tuple(weight_OI.shape), []).append(weight_OI)
    for place in range(MOST_MATRICES):
        for shape, found in matrices.items():
            count = len(head_VC) / num_rows if shape == tuple(slices_RC[0].shape) else len(found)
            ways = (WAYS[place % len(WAYS)],) if len(found) >= 2 * len(WAYS) else WAYS
            for way in ways if place < len(found) else ():
                kernels = ReadyKernels(one=way, several=way)
                yield Product(
                    shape, count, way, ReadyLinear(found[place], None, dtype=model.compute_dtype, kernels=kernels)
                )


def _speeds(products: Sequence[Product], *, rows: int, random: torch.Generator, dtype: torch.dtype) -> dict[Way, float]:
    """Tokens a second in each way through all products, each in the shortest time that it took."""
    inputs = {product.shape: torch.randn(rows, product.shape[1], generator=random).to(dtype) for product in products}
    least = _least_seconds(
        [((product.way, product.shape), partial(product.linear, inputs[product.shape])) for product in products]
    )
    counts = {product.shape: product.count for product in products}
    return {way: rows / sum(count * least[way, shape] for shape, count in counts.items()) for way in WAYS}


def _gain_of_narrow_keys(model: GPT2, *, random: torch.Generator) -> float:
    """Attention of one position of several rows in a few layers: seconds over fp32 keys over those over bf16 keys."""
    heads, positions = model.config.heads, min(KEYS_POSITIONS, model.config.context)
    shape = (KEYS_LAYERS, SEVERAL, heads, positions, model.config.width // heads)
    runs: list[tuple[torch.dtype, Callable[[], Tensor]]] = []
    for dtype in (torch.float32, torch.bfloat16):
        keys, values = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
        q = torch.randn(shape[1:], generator=random)[:, :, :1].to(dtype)
        runs += [(dtype, partial(F.scaled_dot_product_attention, q, k, v)) for k, v in zip(keys, values, strict=True)]
    least = _least_seconds(runs)
    return least[torch.float32] / least[torch.bfloat16]


def _least_seconds(runs: Sequence[tuple[Any, Callable[[], object]]]) -> dict[Any, float]:
    """In turns, the shortest of each name: what else runs on the machine only makes one longer.

    In processor time of this thread, which does all of the work, where the system counts that finely enough.
    """
    least: dict[Any, float] = {}
    fine = time.get_clock_info("thread_time").resolution < FINE_SECONDS
    clock = time.thread_time if fine else time.perf_counter
    began = time.perf_counter()
    for number in range(MOST_ROUNDS):
        for name, run in runs:
            started = clock()
            run()
            least[name] = min(least.get(name, math.inf), max(clock() - started, TINY))
        if number >= LEAST_ROUNDS - 1 and time.perf_counter() - began > SECONDS_FOR_EACH:
            break
    return least


@torch.inference_mode()
def bits_per_byte_of(model: GPT2, tokenizer: TextTokenizer, text: str) -> float:
    """Of a text that begins after an end-of-text token, in windows of the context, as a copy that generates reads it.

    `model`: as `for_inference` gives it. Raises DataError for an empty text.
    """
    ids = [tokenizer.end_of_text, *tokenizer.encode(text)]
    if len(ids) == 1:
        raise DataError("the text is empty", hint="give one of some thousand words")
    nats, context = 0.0, model.config.context
    device = model.transformer.wte.weight.device
    for start in range(0, len(ids) - 1, context):
        window = torch.tensor(ids[start : start + context + 1], device=device)
        x_BTC = model.read_cached(window[None, :-1], model.new_cache(1, context))
        for x_TC, targets_T in zip(
            *(torch.split(part, SCORED_AT_ONCE) for part in (x_BTC[0], window[1:])), strict=True
        ):
            nats += F.cross_entropy(model.logits(x_TC), targets_T, reduction="sum").item()
    return nats / NATS_PER_BIT / len(text.encode())
