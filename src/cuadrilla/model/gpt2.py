"""GPT-2, exactly, in one file: pre-LN blocks, learned positions, tanh-GELU, biases, the head tied to the embedding.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Parameters carry Hugging Face's names, but
linear weights are (out, in); `hf.py` transposes. Any vocabulary size will do.

Invariants
* Weights stay in fp32; `compute_dtype` alone decides the arithmetic: embeddings enter the residual stream in it, and
  a linear layer casts its weights to the dtype of its input. There is no autocast.
* `loss` is a SUM, so that sums over any split of a batch add up. It never holds B*T*V numbers: see `kernels.py`.
* Initial weights depend on torch's CPU generator only.

Letters in tensor names: B sequences, T positions, C width, H heads, D = C/H, V vocabulary, L layers,
S positions in a cache.

torch.compile: block by block (`for block in model.transformer.h: block.compile()`) compiles what gains from it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cuadrilla.model.kernels import (
    attend_in_blocks,
    chunked_cross_entropy,
    cross_entropies,
    embed,
    linear,
    onednn_linear,
)

LAYER_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    vocab_size: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        assert self.width % self.heads == 0, f"width {self.width} is not divisible by {self.heads} heads"


class Linear(nn.Module):
    packed: tuple[Tensor, Tensor] | None = None  # weight and bias as oneDNN likes them, only in `for_inference`

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))
        self.bias = nn.Parameter(torch.empty(features_out))

    def forward(self, x: Tensor) -> Tensor:
        return onednn_linear(x, *self.packed) if self.packed else linear(x, self.weight, self.bias)


class LayerNorm(nn.Module):
    """Statistics are fp32 inside the kernel; only the CPU kernel takes fp32 gains with a narrower input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.device.type == "cpu":
            return F.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPSILON)
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), LAYER_NORM_EPSILON)


class Embedding(nn.Module):
    packed: Tensor | None = None  # for the head, as above

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Attention(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = Linear(config.width, 3 * config.width)
        self.c_proj = Linear(config.width, config.width)

    def forward(self, x_BTC: Tensor, *, layer: int, step: "CachedStep | None") -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            y_BTC.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y_BTC in self.c_attn(x_BTC).split(x_BTC.shape[-1], -1)
        )
        dropout = self.dropout if self.training else 0.0
        if step is not None:
            y_BHTD = attend_cached(q_BHTD, k_BHTD, v_BHTD, step=step, layer=layer)
        elif x_BTC.device.type == "cpu" and x_BTC.dtype == torch.bfloat16 and not dropout:
            y_BHTD = attend_in_blocks(q_BHTD, k_BHTD, v_BHTD)
        else:
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, dropout_p=dropout)
        y_BTC: Tensor = self.c_proj(y_BHTD.transpose(1, 2).flatten(2))
        return dropped(y_BTC, p=dropout)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Linear(config.width, 4 * config.width)
        self.c_proj = Linear(4 * config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC: Tensor = self.c_proj(F.gelu(self.c_fc(x_BTC), approximate="tanh"))
        return dropped(y_BTC, p=self.dropout if self.training else 0.0)


class Block(nn.Module):
    def __init__(self, config: GPT2Config, *, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ln_1 = LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor, step: "CachedStep | None" = None) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), layer=self.layer, step=step)
        x_BTC = x_BTC + self.mlp(self.ln_2(x_BTC))
        return x_BTC


class Transformer(nn.Module):
    """Only holds the parts, under Hugging Face's names."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.width)
        self.wpe = Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config, layer=layer) for layer in range(config.layers))
        self.ln_f = LayerNorm(config.width)


class GPT2(nn.Module):
    """Built on the CPU in fp32. Set `compute_dtype` to choose the arithmetic of the passes."""

    compute_dtype: torch.dtype = torch.float32
    inference_copy = False  # made by `generate.for_inference`

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        if not self.transformer.wte.weight.is_meta:
            self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """N(0, 0.02), residual projections divided by sqrt(2L), biases 0, gains 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("c_proj.weight")
                parameter.normal_(std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits `(B, T, V)` in fp32."""
        x_BTC, head_VC = self._read(ids_BT)
        return linear(x_BTC, head_VC).float()

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """SUM of the cross-entropies (nats) of the targets that are not -100, a scalar in fp32."""
        x_BTC, head_VC = self._read(ids_BT)
        loss: Tensor = chunked_cross_entropy(x_BTC.flatten(0, 1), head_VC, targets_BT.flatten())
        return loss

    def losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The cross-entropy (nats) of every target `(B, T)`, 0 where it is -100. Without gradient."""
        x_BTC, head_VC = self._read(ids_BT)
        return cross_entropies(x_BTC.flatten(0, 1), head_VC, targets_BT.flatten()).view(targets_BT.shape)

    def new_cache(self, batch: int, capacity: int) -> "KVCache":
        """An empty cache for `batch` rows of at most `capacity` positions.

        In fp32 on a CPU, whose attention is up to eight times slower over bf16 keys; elsewhere in the compute dtype.
        """
        layers, heads = self.config.layers, self.config.heads
        shape = (layers, batch, heads, capacity, self.config.width // heads)
        weight = self.transformer.wte.weight
        dtype = torch.float32 if weight.device.type == "cpu" else self.compute_dtype
        keys, values = (weight.new_zeros(shape, dtype=dtype) for _ in range(2))
        return KVCache(k_LBHSD=keys, v_LBHSD=values, lengths=[0] * batch)

    def forward_cached(self, ids_BT: Tensor, cache: "KVCache", *, counts: list[int] | None = None) -> Tensor:
        """Read T more positions of every row, of which the first `counts[b]` are real and the others padding.

        Returns the logits `(B, V)` in fp32 of the last real position of each row. Call it under `torch.no_grad`.
        """
        length = ids_BT.shape[1]
        step = cache.next_step(length)
        assert step.end <= min(self.config.context, cache.capacity), f"no room for {step.end} positions"
        x_BTC, head_VC = self._read(ids_BT, step)
        counts = counts or [length] * len(ids_BT)
        cache.lengths = [done + count for done, count in zip(cache.lengths, counts, strict=True)]
        last_B = torch.tensor(counts, device=x_BTC.device) - 1
        x_BC = x_BTC[:, -1] if min(counts) == length else x_BTC[torch.arange(len(x_BTC), device=x_BTC.device), last_B]
        packed = self.transformer.wte.packed
        logits_BV = linear(x_BC, head_VC) if packed is None else onednn_linear(x_BC, packed, None)
        return logits_BV.float()

    def _read(self, ids_BT: Tensor, step: "CachedStep | None" = None) -> tuple[Tensor, Tensor]:
        """The last hidden states `(B, T, C)`, normalized, and the weight of the head."""
        token_BTC, head_VC = embed(self.transformer.wte.weight, ids_BT)
        if step is None:
            position_TC = self.transformer.wpe.weight[: ids_BT.shape[1]]
        else:
            position_TC = F.embedding(step.positions_BT, self.transformer.wpe.weight)
        x_BTC = (token_BTC + position_TC).to(self.compute_dtype)
        dropout = self.config.dropout if self.training else 0.0
        x_BTC = dropped(x_BTC, p=dropout)
        for block in self.transformer.h:
            if self.config.gradient_checkpointing and torch.is_grad_enabled():
                x_BTC = checkpoint(block, x_BTC, use_reentrant=False, preserve_rng_state=dropout > 0)
            else:
                x_BTC = block(x_BTC, step)
        return self.transformer.ln_f(x_BTC), head_VC


@dataclass
class KVCache:
    """Keys and values of the positions already read; of the S slots of row b, `lengths[b]` are in use."""

    k_LBHSD: Tensor
    v_LBHSD: Tensor
    lengths: list[int]

    @property
    def capacity(self) -> int:
        return self.k_LBHSD.shape[3]

    def keep(self, rows: list[int]) -> None:
        """Forget all rows but these."""
        self.k_LBHSD, self.v_LBHSD = self.k_LBHSD[:, rows], self.v_LBHSD[:, rows]
        self.lengths = [self.lengths[row] for row in rows]

    def next_step(self, length: int) -> "CachedStep":
        """Where the next `length` positions of every row go, and what they may see."""
        device, start = self.k_LBHSD.device, self.lengths[0]
        new_T = torch.arange(length, device=device)
        if all(done == start for done in self.lengths):
            end = start + length
            mask = None
            if 1 < length < end:
                mask = torch.ones(length, end, dtype=torch.bool, device=device).tril(start)
            return CachedStep(self, positions_BT=(start + new_T)[None], start=start, end=end, mask=mask)
        end = max(self.lengths) + length
        positions_BT = torch.tensor(self.lengths, device=device)[:, None] + new_T
        mask = torch.arange(end, device=device) <= positions_BT[:, None, :, None]
        return CachedStep(self, positions_BT=positions_BT, start=None, end=end, mask=mask)


@dataclass(frozen=True)
class CachedStep:
    """One reading of T positions into a cache; `start` is None when the rows are of unequal length."""

    cache: KVCache
    positions_BT: Tensor
    start: int | None
    end: int
    mask: Tensor | None


def dropped(x: Tensor, *, p: float) -> Tensor:
    return F.dropout(x, p) if p else x


def attend_cached(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, step: CachedStep, layer: int) -> Tensor:
    """Write the new keys and values of one layer into the cache, attend to all that a row may see."""
    k_BHSD, v_BHSD = step.cache.k_LBHSD[layer], step.cache.v_LBHSD[layer]
    k_BHTD, v_BHTD = k_BHTD.to(k_BHSD.dtype), v_BHTD.to(v_BHSD.dtype)
    if step.start is not None:
        k_BHSD[:, :, step.start : step.end] = k_BHTD
        v_BHSD[:, :, step.start : step.end] = v_BHTD
    else:
        rows_B1 = torch.arange(len(k_BHTD), device=k_BHTD.device)[:, None]
        k_BHSD[rows_B1, :, step.positions_BT] = k_BHTD.transpose(1, 2)
        v_BHSD[rows_B1, :, step.positions_BT] = v_BHTD.transpose(1, 2)
    y_BHTD = F.scaled_dot_product_attention(
        q_BHTD.to(k_BHSD.dtype),
        k_BHSD[:, :, : step.end],
        v_BHSD[:, :, : step.end],
        attn_mask=step.mask,
        is_causal=step.start == 0 and q_BHTD.shape[2] > 1,
    )
    return y_BHTD.to(q_BHTD.dtype)
