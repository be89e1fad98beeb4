"""Speed of a pass of our GPT-2 on a CPU beside a plain PyTorch GPT-2, with both of the kernels that we can choose.

    python -m bench.kernels [--preset micro mini small] [--threads 2] [--precision fp32] [--rounds 7]

The plain model uses nn.Linear, F.scaled_dot_product_attention and F.cross_entropy over all logits, in fp32. The models
take turns, each with a forward and backward pass over the same random tokens and the same setting of malloc. `speed_up`
is plain seconds over ours, the median of turns: once with matrix products by oneDNN, once with those that torch calls
by itself. In bf16 both are the same. `rule`: the kernel that cuadrilla chooses on this machine.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.common import in_turns, options, ratios, report, summary
from cuadrilla.config import ModelSection
from cuadrilla.host.process import keep_freed_memory
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.kernels import is_amd
from cuadrilla.model.language import shape_of
from cuadrilla.train.precision import choose_precision

VOCABULARIES = {"micro": 1024, "mini": 8192, "small": 50_257}
TOKENS = 2048


class PlainBlock(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(x.shape[-1], -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return y


class PlainGPT2(nn.Module):
    """GPT-2 as it is usually written in PyTorch."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.width), nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(PlainBlock(config) for _ in range(config.layers)))
        self.ln_f = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        logits = F.linear(self.ln_f(self.blocks(x)), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def one_pass(model: Any, ids: Tensor) -> None:
    torch.autograd.backward([model.loss(ids, ids)])
    model.zero_grad()


def measure(preset: str, *, precision: str, rounds: int) -> dict[str, Any]:
    config = shape_of(ModelSection.model_validate({"preset": preset}), tokens=VOCABULARIES[preset])
    chosen = choose_precision(precision, device=torch.device("cpu"))
    models: dict[str, Any] = {"plain": PlainGPT2(config), "onednn": GPT2(config), "torch": GPT2(config)}
    for name in ("onednn", "torch"):
        chosen.apply(models[name])
        models[name].use(onednn=name == "onednn")
    ids = torch.randint(config.vocab_size, (max(1, TOKENS // config.context), config.context))
    passes = {name: partial(one_pass, model, ids) for name, model in models.items()}
    took = {name: seconds[1:] for name, seconds in in_turns(passes, rounds=1 + rounds).items()}
    return {
        "precision": str(chosen),
        "rule": "onednn" if is_amd() else "torch",
        "plain_milliseconds": summary([1e3 * value for value in took["plain"]]),
        "speed_up_onednn": ratios(took["plain"], took["onednn"]),
        "speed_up_torch": ratios(took["plain"], took["torch"]),
    }


def main() -> None:
    given = options(__doc__, preset=list(VOCABULARIES), threads=2, precision="fp32", rounds=7)
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    report("kernels", **{name: measure(name, precision=given.precision, rounds=given.rounds) for name in given.preset})


if __name__ == "__main__":
    main()
