"""GPT-2, exactly, in one file: pre-LN blocks, learned positions, tanh-GELU, biases, the head tied to the embedding; and
what published GPT-2s have instead: another width inside, exact GELU, epsilon or scale of attention, a head of its own.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuadrilla.model.kernels import (
    Taught,
    attend_in_blocks,
    chunked_cross_entropy,
    cross_entropies,
    embed,
    linear,
)

LAYER_NORM_EPSILON = 1e-5
INNER = 4
"""The MLP's inner width, in widths of the model."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    vocab_size: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    inner: int = 0
    """The MLP's inner width (0: four times the model's)."""
    exact_gelu: bool = False
    epsilon: float = LAYER_NORM_EPSILON
    scale_attention: bool = True
    """By 1/sqrt(D)."""
    scale_by_layer: bool = False
    """By 1/(layer + 1) as well, layers from 0."""
    tied: bool = True
    """The head is the embedding."""

    def __post_init__(self) -> None:
        assert self.width % self.heads == 0, f"width {self.width} is not divisible by {self.heads} heads"


class Linear(nn.Module):
    ready: Callable[[Tensor], Tensor] | None = None  # the whole product as it is fastest, only in `for_inference`
    onednn = True  # see `GPT2.use`

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))
        self.bias = nn.Parameter(torch.empty(features_out))

    def forward(self, x: Tensor) -> Tensor:
        if self.ready is not None:
            return self.ready(x)
        return linear(x, self.weight, self.bias, onednn=self.onednn)


class LayerNorm(nn.Module):
    """Statistics are fp32 inside the kernel; only the CPU kernel takes fp32 gains with a narrower input."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.epsilon = config.epsilon
        self.weight = nn.Parameter(torch.empty(config.width))
        self.bias = nn.Parameter(torch.empty(config.width))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.device.type == "cpu":
            return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), self.epsilon)


class Embedding(nn.Module):
    ready: Callable[[Tensor], Tensor] | None = None  # for the head, as above

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, *, layer: int) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.scale = (config.width // config.heads) ** -0.5 if config.scale_attention else 1.0
        self.scale /= layer + 1 if config.scale_by_layer else 1
        self.c_attn = Linear(config.width, 3 * config.width)
        self.c_proj = Linear(config.width, config.width)

    def forward(self, x_BTC: Tensor, *, layer: int, step: "CachedStep | JoinedStep | None") -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            y_BTC.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y_BTC in self.c_attn(x_BTC).split(x_BTC.shape[-1], -1)
        )
        dropout = self.dropout if self.training else 0.0
        if step is not None:
            y_BHTD = step.attend(q_BHTD, k_BHTD, v_BHTD, layer=layer, scale=self.scale)
        elif x_BTC.device.type == "cpu" and x_BTC.dtype == torch.bfloat16 and not dropout:
            y_BHTD = attend_in_blocks(q_BHTD, k_BHTD, v_BHTD, scale=self.scale)
        else:
            y_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BHTD, v_BHTD, is_causal=True, dropout_p=dropout, scale=self.scale
            )
        y_BTC: Tensor = self.c_proj(y_BHTD.transpose(1, 2).flatten(2))
        return dropped(y_BTC, p=dropout)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.approximate = "none" if config.exact_gelu else "tanh"
        inner = config.inner or INNER * config.width
        self.c_fc = Linear(config.width, inner)
        self.c_proj = Linear(inner, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC: Tensor = self.c_proj(F.gelu(self.c_fc(x_BTC), approximate=self.approximate))
        return dropped(y_BTC, p=self.dropout if self.training else 0.0)


class Block(nn.Module):
    def __init__(self, config: GPT2Config, *, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, layer=layer)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor, step: "CachedStep | JoinedStep | None" = None) -> Tensor:
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
        self.ln_f = LayerNorm(config)


class GPT2(nn.Module):
    """Built on the CPU in fp32. Set `compute_dtype` to choose the arithmetic of the passes."""

    compute_dtype: torch.dtype = torch.float32
    onednn = True
    inference_copy = False  # made by `generate.for_inference`
    narrow_keys = False  # in a cache on a CPU, where the passes are in bf16

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        if not config.tied:
            self.lm_head = Embedding(config.vocab_size, config.width)
        if not self.transformer.wte.weight.is_meta:
            self.initialize()

    def use(self, *, onednn: bool) -> None:
        """Whether products in fp32 on a CPU are oneDNN's, or what torch calls. The last bits differ."""
        for module in self.modules():
            if isinstance(module, GPT2 | Linear):
                module.onednn = onednn

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

    def loss(
        self, ids_BT: Tensor, targets_BT: Tensor, *, teachers: "Sequence[GPT2]" = (), share: float = 0.0
    ) -> Tensor:
        """SUM of the cross-entropies (nats) of the targets that are not -100, a scalar in fp32.

        With `teachers`, models of the same tokens, `share` of it is the cross-entropy with their mean probabilities.
        """
        x_BTC, head_VC = self._read(ids_BT)
        taught = None
        if teachers:
            with torch.no_grad():
                read = [teacher._read(ids_BT) for teacher in teachers]
            taught = Taught(share=share, x_NC=[x.flatten(0, 1) for x, _ in read], weight_VC=[head for _, head in read])
        loss: Tensor = chunked_cross_entropy(
            x_BTC.flatten(0, 1), head_VC, targets_BT.flatten(), onednn=self.onednn, taught=taught
        )
        return loss

    def losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The cross-entropy (nats) of every target `(B, T)`, 0 where it is -100. Without gradient."""
        x_BTC, head_VC = self._read(ids_BT)
        losses_N = cross_entropies(x_BTC.flatten(0, 1), head_VC, targets_BT.flatten(), onednn=self.onednn)
        return losses_N.view(targets_BT.shape)

    def new_cache(self, batch: int, capacity: int) -> "KVCache":
        """An empty cache for `batch` rows of at most `capacity` positions.

        On a CPU in fp32 unless `narrow_keys`: attention over bf16 keys takes half the time on some, eight times as long
        on others. Elsewhere in the compute dtype.
        """
        layers, heads = self.config.layers, self.config.heads
        shape = (layers, batch, heads, capacity, self.config.width // heads)
        weight = self.transformer.wte.weight
        is_wide = weight.device.type == "cpu" and not self.narrow_keys
        dtype = torch.float32 if is_wide else self.compute_dtype
        keys, values = (weight.new_zeros(shape, dtype=dtype) for _ in range(2))
        return KVCache(k_LBHSD=keys, v_LBHSD=values, lengths=[0] * batch)

    def forward_cached(self, ids_BT: Tensor, cache: "KVCache", *, counts: list[int] | None = None) -> Tensor:
        """Read T more positions of every row, of which the first `counts[b]` are real and the others padding.

        Returns the logits `(B, V)` in fp32 of the last real position of each row. Call it under `torch.no_grad`.
        """
        return self.logits(last_of(self.read_cached(ids_BT, cache, counts=counts), counts))

    def read_cached(self, ids_BT: Tensor, cache: "KVCache", *, counts: list[int] | None = None) -> Tensor:
        """As `forward_cached`, but returns the last hidden states `(B, T, C)`, for `logits`."""
        x_BTC, _ = self._read(ids_BT, self._next_step(cache, length=ids_BT.shape[1]))
        cache.advance(counts or [ids_BT.shape[1]] * len(ids_BT))
        return x_BTC

    def read_together(self, readings: "Sequence[CachedReading]") -> list[Tensor]:
        """As `read_cached` each, in one pass, which reads the weights once for all of them."""
        if len(readings) == 1:
            return [self.read_cached(each.ids_BT, each.cache, counts=each.counts) for each in readings]
        steps = [self._next_step(each.cache, length=each.ids_BT.shape[1]) for each in readings]
        joined = JoinedStep(steps, [each.ids_BT.shape for each in readings])
        x_1NC, _ = self._read(torch.cat([each.ids_BT.flatten() for each in readings])[None], joined)
        for each in readings:
            each.cache.advance(each.counts)
        parts = torch.split(x_1NC[0], [each.ids_BT.numel() for each in readings])
        return [x_NC.view(*each.ids_BT.shape, -1) for x_NC, each in zip(parts, readings, strict=True)]

    def _next_step(self, cache: "KVCache", *, length: int) -> "CachedStep":
        step = cache.next_step(length)
        assert step.end <= min(self.config.context, cache.capacity), f"no room for {step.end} positions"
        return step

    def logits(self, x_BC: Tensor) -> Tensor:
        """`(B, V)` in fp32, without gradient."""
        ready = self.head.ready
        logits_BV = linear(x_BC, self.head.weight) if ready is None else ready(x_BC)
        return logits_BV.float()

    @property
    def head(self) -> Embedding:
        """What logits are computed with: the embedding, or a matrix of its own."""
        return self.transformer.wte if self.config.tied else self.lm_head

    def _read(self, ids_BT: Tensor, step: "CachedStep | JoinedStep | None" = None) -> tuple[Tensor, Tensor]:
        """The last hidden states `(B, T, C)`, normalized, and the weight of the head."""
        if self.config.tied:
            token_BTC, head_VC = embed(self.transformer.wte.weight, ids_BT)
        else:
            token_BTC, head_VC = F.embedding(ids_BT, self.transformer.wte.weight), self.lm_head.weight
        if step is None:
            position_TC = self.transformer.wpe.weight[: ids_BT.shape[1]]
        else:
            position_TC = F.embedding(step.positions_BT, self.transformer.wpe.weight)
        x_BTC = (token_BTC + position_TC).to(self.compute_dtype)
        dropout = self.config.dropout if self.training else 0.0
        x_BTC = dropped(x_BTC, p=dropout)
        for block in self.transformer.h:
            x_BTC = block(x_BTC, step)
        return self.transformer.ln_f(x_BTC), head_VC


def last_of(x_BTC: Tensor, counts: Sequence[int] | None) -> Tensor:
    """The last real position of each row `(B, C)`."""
    if counts is None or min(counts) == x_BTC.shape[1]:
        return x_BTC[:, -1]
    last_B = torch.tensor(counts, device=x_BTC.device) - 1
    return x_BTC[torch.arange(len(x_BTC), device=x_BTC.device), last_B]


@dataclass
class KVCache:
    """Keys and values of the positions already read; of the S slots of row b, `lengths[b]` are in use."""

    k_LBHSD: Tensor
    v_LBHSD: Tensor
    lengths: list[int]

    @property
    def capacity(self) -> int:
        return self.k_LBHSD.shape[3]

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
        ragged = length == 1 and device.type == "cpu" and self._wasted_bytes > len(self.lengths) * BYTES_PER_CALL
        return CachedStep(self, positions_BT=positions_BT, start=None, end=end, mask=mask, is_ragged=ragged)

    def advance(self, counts: Sequence[int]) -> None:
        self.lengths = [done + count for done, count in zip(self.lengths, counts, strict=True)]

    @property
    def _wasted_bytes(self) -> int:
        """Of a layer's keys and values, what is read in vain if all rows are read up to the longest."""
        of_position = 2 * self.k_LBHSD.shape[2] * self.k_LBHSD.shape[4] * self.k_LBHSD.element_size()
        return (max(self.lengths) * len(self.lengths) - sum(self.lengths)) * of_position


@dataclass(frozen=True)
class CachedStep:
    """One reading of T positions into a cache; `start` is None when the rows are of unequal length."""

    cache: KVCache
    positions_BT: Tensor
    start: int | None
    end: int
    mask: Tensor | None
    is_ragged: bool = False
    """One position of every row, and it pays on this CPU to read each no further than it goes."""

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, layer: int, scale: float) -> Tensor:
        return attend_cached(q_BHTD, k_BHTD, v_BHTD, step=self, layer=layer, scale=scale)


@dataclass(frozen=True)
class CachedReading:
    """T more positions of every row of a cache, of which the first `counts[b]` are real and the others padding."""

    ids_BT: Tensor
    cache: KVCache
    counts: list[int]


@dataclass(frozen=True)
class JoinedStep:
    """Several readings whose N positions stand in one row, one reading behind the other: products see them all at once,
    attention sees each by itself."""

    steps: Sequence[CachedStep]
    shapes: Sequence[torch.Size]
    """(B, T) of each."""

    @property
    def positions_BT(self) -> Tensor:
        """Of all, (1, N)."""
        each = zip(self.steps, self.shapes, strict=True)
        return torch.cat([step.positions_BT.expand(shape).flatten() for step, shape in each])[None]

    def attend(self, q_1HND: Tensor, k_1HND: Tensor, v_1HND: Tensor, *, layer: int, scale: float) -> Tensor:
        lengths = [shape.numel() for shape in self.shapes]
        parts = zip(*(torch.split(x_1HND[0], lengths, 1) for x_1HND in (q_1HND, k_1HND, v_1HND)), strict=True)
        attended = []
        for step, shape, part in zip(self.steps, self.shapes, parts, strict=True):
            q_BHTD, k_BHTD, v_BHTD = (x_HND.unflatten(1, shape).transpose(0, 1) for x_HND in part)
            y_BHTD = attend_cached(q_BHTD, k_BHTD, v_BHTD, step=step, layer=layer, scale=scale)
            attended.append(y_BHTD.transpose(0, 1).flatten(1, 2))
        return torch.cat(attended, 1)[None]


# Attention over a cache whose rows are of unequal length computes all of them up to the longest one. Row by row costs
# about 10 us more each, as much as the keys and values of so many bytes.
BYTES_PER_CALL = 100_000


def dropped(x: Tensor, *, p: float) -> Tensor:
    return F.dropout(x, p) if p else x


def attend_cached(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, step: CachedStep, layer: int, scale: float
) -> Tensor:
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
    if step.is_ragged:
        rows = zip(q_BHTD[:, None].to(k_BHSD.dtype), k_BHSD[:, None], v_BHSD[:, None], step.cache.lengths, strict=True)
        attend = partial(F.scaled_dot_product_attention, scale=scale)
        y_BHTD = torch.cat([attend(q, k[:, :, : done + 1], v[:, :, : done + 1]) for q, k, v, done in rows])
        return y_BHTD.to(q_BHTD.dtype)
    y_BHTD = F.scaled_dot_product_attention(
        q_BHTD.to(k_BHSD.dtype),
        k_BHSD[:, :, : step.end],
        v_BHSD[:, :, : step.end],
        attn_mask=step.mask,
        is_causal=step.start == 0 and q_BHTD.shape[2] > 1,
        scale=scale,
    )
    return y_BHTD.to(q_BHTD.dtype)
