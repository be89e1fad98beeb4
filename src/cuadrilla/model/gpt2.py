"""GPT-2, exactly, in one file: pre-LN blocks, learned positions, tanh-GELU, biases, the head tied to the embedding.
`GPT2Config` also has the exact GELU of some published GPT-2s.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Parameters have Hugging Face's names, but
linear weights are (out, in); `hf.py` transposes them. The vocabulary may have any size.

Invariants
* Weights stay in fp32. Only `compute_dtype` decides the dtype of the arithmetic: embeddings are cast to it, and each
  linear layer casts its weights to the dtype of its input. There is no autocast.
* `loss` is a SUM: the losses of a batch's parts add up to its loss. It never stores all B*T*V logits: see `kernels.py`.
* Initial weights depend only on torch's CPU generator.

Letters in tensor names: B sequences, T positions, C width, H heads, D = C/H, V vocabulary.

torch.compile: compile block by block (`for block in model.transformer.h: block.compile()`); the rest gains nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cuadrilla.model.kernels import attend_in_blocks, chunked_cross_entropy, cross_entropies, linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention with a KV cache (`inference.py`): takes layer, queries, keys and values, each `(B, H, T, D)`."""
LAYER_NORM_EPSILON = 1e-5
INNER = 4
"""The MLP's inner width, as a multiple of the model's width."""
TEACHER_SHARE = 0.5
"""Share of the training loss that comes from the teachers. 0.75 left a higher held-out loss (docs/experiments.md)."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    vocab_size: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    exact_gelu: bool = False
    """GELU with the error function instead of tanh."""

    def __post_init__(self) -> None:
        assert self.width % self.heads == 0, f"width {self.width} is not divisible by {self.heads} heads"


class Linear(nn.Module):
    onednn = True  # see `GPT2.use`

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))
        self.bias = nn.Parameter(torch.empty(features_out))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, onednn=self.onednn)


class LayerNorm(nn.Module):
    """The kernel's statistics are fp32. Only the CPU kernel accepts fp32 parameters with an input in bf16 or fp16."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.width))
        self.bias = nn.Parameter(torch.empty(config.width))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.device.type == "cpu":
            return F.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPSILON)
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), LAYER_NORM_EPSILON)


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, *, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.dropout = layer, config.heads, config.dropout
        self.c_attn = Linear(config.width, 3 * config.width)
        self.c_proj = Linear(config.width, config.width)

    def forward(self, x_BTC: Tensor, attend: Attend | None) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            y_BTC.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y_BTC in self.c_attn(x_BTC).split(x_BTC.shape[-1], -1)
        )
        dropout = self.dropout if self.training else 0.0
        if attend is not None:
            y_BHTD = attend(self.layer, q_BHTD, k_BHTD, v_BHTD)
        elif x_BTC.device.type == "cpu" and x_BTC.dtype == torch.bfloat16 and not dropout:
            y_BHTD = attend_in_blocks(q_BHTD, k_BHTD, v_BHTD)
        else:
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, dropout_p=dropout)
        y_BTC: Tensor = self.c_proj(y_BHTD.transpose(1, 2).flatten(2))
        return F.dropout(y_BTC, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.approximate = "none" if config.exact_gelu else "tanh"
        self.c_fc = Linear(config.width, INNER * config.width)
        self.c_proj = Linear(INNER * config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC: Tensor = self.c_proj(F.gelu(self.c_fc(x_BTC), approximate=self.approximate))
        return F.dropout(y_BTC, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPT2Config, *, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, layer=layer)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor, attend: Attend | None = None) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), attend)
        x_BTC = x_BTC + self.mlp(self.ln_2(x_BTC))
        return x_BTC


class Transformer(nn.Module):
    """Holds the modules under Hugging Face's names; `GPT2.read` runs them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.width)
        self.wpe = Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config, layer=layer) for layer in range(config.layers))
        self.ln_f = LayerNorm(config)


class GPT2(nn.Module):
    """A new model is on the CPU in fp32. `compute_dtype` is the dtype in which forward and backward passes compute.

    `recompute`: gradient checkpointing. The backward pass computes the activations of each block again, from its input
    and with the same random numbers, so the bits stay the same.
    """

    compute_dtype: torch.dtype = torch.float32
    recompute = False
    onednn = True

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        if not self.transformer.wte.weight.is_meta:
            self.initialize()

    def use(self, *, onednn: bool) -> None:
        """Compute fp32 matrix products on a CPU with oneDNN, or with torch's default library. The last bits differ."""
        for module in self.modules():
            if isinstance(module, GPT2 | Linear):
                module.onednn = onednn

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw matrices from N(0, 0.02), residual projections divided by sqrt(2 * layers). Biases are 0, gains 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("c_proj.weight")
                parameter.normal_(std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits `(B, T, V)` in fp32."""
        return linear(self.read(ids_BT), self.transformer.wte.weight).float()

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, *, teachers: "Sequence[GPT2]" = ()) -> Tensor:
        """SUM of the cross-entropies (nats) of all targets but those that are -100, a scalar in fp32.

        With `teachers` (models with the same vocabulary), `TEACHER_SHARE` of it is the cross-entropy with the mean of
        their probabilities.
        """
        x_NC, head_VC = self.read(ids_BT).flatten(0, 1), self.transformer.wte.weight
        with torch.no_grad():
            theirs = [
                (teacher.read(ids_BT).flatten(0, 1), teacher.transformer.wte.weight.to(self.compute_dtype))
                for teacher in teachers
            ]
        targets_N, share = targets_BT.flatten(), TEACHER_SHARE if teachers else 0.0
        return chunked_cross_entropy(x_NC, head_VC, targets_N, onednn=self.onednn, teachers=theirs, share=share)

    def losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy (nats) of every target, `(B, T)`; 0 where the target is -100. Computes no gradient."""
        x_NC, head_VC = self.read(ids_BT).flatten(0, 1), self.transformer.wte.weight
        losses_N = cross_entropies(x_NC, head_VC, targets_BT.flatten(), onednn=self.onednn)
        return losses_N.view(targets_BT.shape)

    def read(self, ids_BT: Tensor, *, positions_BT: Tensor | None = None, attend: Attend | None = None) -> Tensor:
        """The hidden states after the last layer norm, `(B, T, C)`.

        By default positions count from 0 and attention is causal. A KV cache gives its own `positions_BT` and `attend`.
        """
        token_BTC = F.embedding(ids_BT, self.transformer.wte.weight)
        wpe_TC = self.transformer.wpe.weight
        position_TC = wpe_TC[: ids_BT.shape[1]] if positions_BT is None else F.embedding(positions_BT, wpe_TC)
        x_BTC = (token_BTC + position_TC).to(self.compute_dtype)
        x_BTC = F.dropout(x_BTC, self.config.dropout, self.training)
        for block in self.transformer.h:
            again = self.recompute and torch.is_grad_enabled()
            x_BTC = checkpoint(block, x_BTC, attend, use_reentrant=False) if again else block(x_BTC, attend)
        hidden_BTC: Tensor = self.transformer.ln_f(x_BTC)
        return hidden_BTC
