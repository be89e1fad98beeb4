"""Which kernels are faster on this machine: measured once for each processor, torch and shape of model, then kept.

Invariants
* Only what computes the same up to rounding is chosen from. Strict mode takes what is usual, unmeasured: its bits must
  be the same on machines that would choose otherwise.
* The first measurement holds, also for another process that measured at the same time: a training that is resumed has
  the bits it would have had. It is kept in the home folder; deleting `kernels.json` has everything measured again.
* What is usual stays unless something else is faster by `WORTH_IT`.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from cuadrilla.errors import ConfigError, ResourceError
from cuadrilla.host.environment import read_environment
from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2, Attention, Block, Linear
from cuadrilla.model.kernels import AS_USUAL, Kernels, has_onednn
from cuadrilla.rundir import FolderLock, make_private, read_regular, write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WORTH_IT = 1.03
SECONDS_FOR_EACH = 0.5
LEAST_ROUNDS, MOST_ROUNDS = 3, 30
TOKENS = 512
"""In one measured pass."""
PASS_TOKENS, LONG_PASS_TOKENS = 2048, 4096
"""Most of a pass on a processor: longer ones take more memory, and it would answer later. In bf16, where each pass
casts the weights, twice as much may be faster."""
LARGEST_WIDTH = 512
"""Wider models have long passes as it is."""
WRITE_TRIES, WRITE_PAUSE_SECONDS = 20, 0.1
LEAST_WIDTH = 96
"""Narrower models are for trying things out: a measurement would take longer than it saves."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """What is computed with, in passes of how many tokens; and the seconds of what is usual over each other way's."""

    kernels: Kernels
    ratios: dict[str, float]
    pass_tokens: int = PASS_TOKENS

    @property
    def is_usual(self) -> bool:
        return self.kernels == AS_USUAL and self.pass_tokens == PASS_TOKENS

    def __str__(self) -> str:
        if not self.ratios:
            return Message("as usual")
        names = {
            "onednn": Message("fp32 products by torch's library"),
            "fused": Message("fused attention"),
            "blocks": Message("attention in blocks"),
            "passes": Message("passes of {tokens:,} tokens", tokens=LONG_PASS_TOKENS),
        }
        told = (
            Message("{name} {ratio:.2f} times as fast", name=names[name], ratio=ratio)
            for name, ratio in self.ratios.items()
        )
        return Message(
            "as usual ({ratios})" if self.is_usual else "chosen here ({ratios})",
            ratios=reduce(lambda one, other: Message("{one}, {other}", one=one, other=other), told),
        )


def choose_kernels(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, strict: bool, home: Path
) -> KernelChoice:
    """Have `model` use what is fastest here."""
    if not isinstance(model, GPT2) or device.type != "cpu" or strict or model.config.width < LEAST_WIDTH:
        return KernelChoice(kernels=AS_USUAL, ratios={})
    config = model.config
    shape = (config.width, config.heads, min(config.context, TOKENS), config.inner)
    parts = (read_environment()["cpu"], torch.__version__, str(dtype), *shape)
    key = " | ".join(map(str, parts))
    choice = kept(home, section="choices", key=key, measure=lambda: _measured(model, dtype), parse=_parse)
    model.use(choice.kernels)
    return choice


Choice = TypeVar("Choice", bound="DataclassInstance")


def kept(
    home: Path, *, section: str, key: str, measure: Callable[[], Choice], parse: Callable[[Any], Choice]
) -> Choice:
    """What was measured before, else what is measured now and kept in a section of the home folder's `kernels.json`."""
    path = home / "kernels.json"
    found = _found(_read(path), section, key, parse)
    if found is not None:
        return found
    choice = measure()
    why = ""
    for _ in range(WRITE_TRIES):
        try:
            make_private(path.parent)
            with FolderLock(path.with_suffix(".lock"), purpose=Message("choosing kernels")):
                rows = _read(path)
                if (found := _found(rows, section, key, parse)) is not None:
                    return found
                rows[section] = {**rows.get(section, {}), key: asdict(choice)}
                write_json(path, rows, private=True)
                return choice
        except (ConfigError, ResourceError) as error:  # another process is writing, or nothing can be written here
            why = error.message
            time.sleep(WRITE_PAUSE_SECONDS)
    log.info("the choice of kernels is not kept: %s", why)
    return _found(_read(path), section, key, parse) or choice


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of the file, with their rows; those that are none are left out."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError):
        return {}
    sections = found.items() if isinstance(found, dict) else ()
    return {name: rows for name, rows in sections if isinstance(rows, dict)}


def _found(
    sections: dict[str, dict[str, Any]], section: str, key: str, parse: Callable[[Any], Choice]
) -> Choice | None:
    """None for a row that is not there or cannot be read."""
    try:
        return parse(sections[section][key])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _parse(row: Any) -> KernelChoice:
    return KernelChoice(
        kernels=Kernels(onednn=bool(row["kernels"]["onednn"]), blocks=row["kernels"]["blocks"]),
        ratios={str(name): float(ratio) for name, ratio in row["ratios"].items()},
        pass_tokens=int(row.get("pass_tokens", PASS_TOKENS)),
    )


def _measured(model: GPT2, dtype: torch.dtype) -> KernelChoice:
    """Passes through the parts of one block of such a model, what is usual and each other way in turn."""
    random = torch.Generator().manual_seed(0)  # the training's own numbers stay as they are
    block = Block(model.config, layer=0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.02, generator=random)
    x_BTC = _numbers(model, TOKENS, random).to(dtype)
    in_blocks = AS_USUAL.attends_in_blocks(dtype)
    name = "fused" if in_blocks else "blocks"
    chosen: dict[str, bool] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where other programs run, and measure those
    attention = partial(block.attn, layer=0, step=None)
    ratios = {name: _speed_up(_kernel(attention, block, x_BTC), _kernel(attention, block, x_BTC, blocks=not in_blocks))}
    if ratios[name] >= WORTH_IT:
        chosen["blocks"] = not in_blocks
    if dtype == torch.float32 and has_onednn(x_BTC.device, dtype):
        ratios["onednn"] = _speed_up(_kernel(block.mlp, block, x_BTC), _kernel(block.mlp, block, x_BTC, onednn=False))
        if ratios["onednn"] >= WORTH_IT:
            chosen["onednn"] = False
    kernels, pass_tokens = replace(AS_USUAL, **chosen), PASS_TOKENS
    if dtype == torch.bfloat16 and model.config.width <= LARGEST_WIDTH:
        x_BTC = _numbers(model, LONG_PASS_TOKENS, random).to(dtype)
        halves = x_BTC.chunk(LONG_PASS_TOKENS // PASS_TOKENS)
        ratios["passes"] = _speed_up(_kernel(block, block, *halves, **chosen), _kernel(block, block, x_BTC, **chosen))
        if ratios["passes"] >= WORTH_IT:
            pass_tokens = LONG_PASS_TOKENS
    torch.set_num_threads(threads)
    return KernelChoice(kernels=kernels, ratios=ratios, pass_tokens=pass_tokens)


def _numbers(model: GPT2, tokens: int, random: torch.Generator) -> Tensor:
    length = min(model.config.context, TOKENS)
    return torch.randn(max(1, tokens // length), length, model.config.width, generator=random)


def _kernel(part: Callable[[Tensor], Tensor], block: Block, *passes_BTC: Tensor, **other: bool) -> Callable[[], None]:
    """Passes through a part of the block, with `other` kernels than the usual ones."""

    def run() -> None:
        for module in block.modules():
            if isinstance(module, Attention | Linear):
                module.kernels = replace(AS_USUAL, **other)
        for x_BTC in passes_BTC:
            torch.autograd.backward([part(x_BTC.detach().requires_grad_()).float().sum()])

    return run


def _speed_up(usual: Callable[[], None], other: Callable[[], None]) -> float:
    """The seconds of what is usual over those of another way: of several turns the shortest of each.

    What else runs on the machine only makes a pass longer.
    """
    least = [math.inf, math.inf]
    began = time.perf_counter()
    for number in range(MOST_ROUNDS):
        for place, run in enumerate((usual, other)):
            started = time.perf_counter()
            run()
            least[place] = min(least[place], time.perf_counter() - started)
        if number >= LEAST_ROUNDS and time.perf_counter() - began > SECONDS_FOR_EACH:
            break
    return least[0] / least[1]
