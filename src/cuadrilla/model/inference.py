"""A GPT-2 that only generates: one pass reads the new tokens of many rows, and each row has its own KV cache.

Invariants
* The new tokens of all rows are concatenated, without padding. Matrix products take them together; attention keeps the
  rows apart.
* A row's results do not depend on other rows, up to the rounding of products of another size. They have no gradient.

Letters in tensor names: N new tokens of all rows, L layers, B slots (one row each), H heads, S positions of a slot,
D width of a head, C width, I, O features in and out, V vocabulary, G rows with one new token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuadrilla.model.gpt2 import GPT2, Linear
from cuadrilla.model.kernels import has_onednn, is_amd, linear, onednn_linear

PACKED_FOR_ROWS = 16
"""Number of rows for which oneDNN packs weights. On an Intel Xeon with AMX, 16 rows take 60 ms through all fp32
matrices of a 124M model packed for 16 rows, 71 ms packed for one. For a single row, and in bf16, both are as fast."""
BYTES_PER_CALL = 100_000
"""Rows with one new token each share one call of attention, padded to the longest row. On a CPU each row has a call of
its own if the padding is more than this many bytes per row: reading them takes as long as a call, about 10 us."""


@dataclass
class KVCache:
    """Keys and values of the tokens read so far. The first `lengths[b]` of the S positions of slot b are in use."""

    k_LBHSD: Tensor
    v_LBHSD: Tensor
    lengths: list[int]


class InferenceModel:
    """A copy of a model whose weights are laid out for fast generation.

    On a CPU with oneDNN it shares the model's parameters, and also holds the matrices in oneDNN's order. Elsewhere it
    holds weights in the compute dtype: casting them at every token would cost more than the token.
    """

    def __init__(self, model: GPT2) -> None:
        self.config, self.device, self.dtype = model.config, model.transformer.wte.weight.device, model.compute_dtype
        state, is_packed = model.state_dict(), has_onednn(self.device, self.dtype)
        with torch.device("meta"):
            self.model = GPT2(model.config).eval()
        self.model.compute_dtype = self.dtype
        weights = state if is_packed else {name: value.to(self.dtype) for name, value in state.items()}
        self.model.load_state_dict(weights, assign=True)
        self._head = PackedLinear(self.model.transformer.wte.weight, None, dtype=self.dtype) if is_packed else None
        for module in [module for module in self.model.modules() if is_packed]:
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    setattr(module, name, PackedLinear(child.weight, child.bias, dtype=self.dtype))

    def new_cache(self, slots: int) -> KVCache:
        """An empty cache. On a CPU without AMX it is always fp32: bf16 makes a 124M model 13 % faster on a Xeon with
        AMX, but attention takes 2.8 times as long on an EPYC."""
        heads = self.config.heads
        shape = (self.config.layers, slots, heads, self.config.context, self.config.width // heads)
        is_wide = self.device.type == "cpu" and not torch.cpu._is_amx_tile_supported()
        dtype = torch.float32 if is_wide else self.dtype
        keys, values = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))
        return KVCache(keys, values, [0] * slots)

    def read(self, cache: KVCache, parts: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Read new tokens into the cache; `parts` are pairs (slot, its new tokens). Returns the last hidden states of
        all new tokens, concatenated: `(N, C)`."""
        step = _Step(cache, parts)
        ids_1N = torch.tensor([[token for _, tokens in parts for token in tokens]], device=self.device)
        x_1NC = self.model.read(ids_1N, positions_BT=step.positions_N[None], attend=step.attend)
        for span in step.spans:
            cache.lengths[span.slot] = span.end
        return x_1NC[0]

    def logits(self, x_NC: Tensor) -> Tensor:
        """Logits `(N, V)` in fp32."""
        logits_NV: Tensor = linear(x_NC, self.model.transformer.wte.weight) if self._head is None else self._head(x_NC)
        return logits_NV.float()


class PackedLinear(nn.Module):
    """A linear layer whose weight is in the order that oneDNN reads fastest.

    Except on AMD's processors, a single fp32 row uses torch's `F.linear` and the unpacked weight. On an Intel Xeon with
    AMX that gives 1.16 times as many tokens a second for a 124M model, 1.43 times as many for a 10M model.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype) -> None:
        super().__init__()
        weight_OI = weight_OI.detach().to(dtype)
        self._bias_O = None if bias_O is None else bias_O.detach().to(dtype)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR_ROWS)
        self._for_one_OI = weight_OI if dtype == torch.float32 and not is_amd() else None

    def forward(self, x: Tensor) -> Tensor:
        if self._for_one_OI is not None and x.numel() == x.shape[-1]:
            return F.linear(x, self._for_one_OI, self._bias_O)
        return onednn_linear(x, self._packed, self._bias_O)


@dataclass(frozen=True)
class _Span:
    """The new tokens of one slot: `first` to `last` in the concatenation, positions `start` to `end` in the slot."""

    slot: int
    first: int
    last: int
    start: int
    end: int
    mask_TS: Tensor | None


class _Step:
    """One pass that reads new tokens into a cache: indices, masks and the attention of each layer."""

    def __init__(self, cache: KVCache, parts: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._cache, self._device = cache, cache.k_LBHSD.device
        self.spans: list[_Span] = []
        for (slot, tokens), last in zip(parts, accumulate(len(tokens) for _, tokens in parts), strict=True):
            start, length = cache.lengths[slot], len(tokens)
            end = start + length
            assert end <= cache.k_LBHSD.shape[3], f"no room for {end} positions"
            mask_TS = None
            if start > 0 and length > 1:
                mask_TS = torch.ones(length, end, dtype=torch.bool, device=self._device).tril(start)
            self.spans.append(_Span(slot, last - length, last, start, end, mask_TS))
        first = self.spans[0].start
        self._is_aligned = all(
            (span.slot, span.last, span.start) == (number, number + 1, first) for number, span in enumerate(self.spans)
        )
        """Slots 0 to n - 1 have one new token each, all at the same position: slices replace looking slots up."""
        self.positions_N = self._indices([at for span in self.spans for at in range(span.start, span.end)])
        self._slots_N = self._indices([slot for slot, tokens in parts for _ in tokens])
        ones = {span.slot: span for span in self.spans if span.last - span.first == 1}
        self._longest = max((span.end for span in ones.values()), default=0)
        if self._wastes(ones):
            ones, self._longest = {}, 0
        self._alone = [span for span in self.spans if span.slot not in ones]
        self._slots_G = self._indices(list(ones))
        self._lines_G = self._indices([span.first for span in ones.values()])
        slots = range(max(ones, default=-1) + 1)
        self._lines_B = self._indices([ones[slot].first if slot in ones else 0 for slot in slots])
        ends, self._mask_B11S = [ones[slot].end if slot in ones else 0 for slot in slots], None
        if any(end != self._longest for end in ends):
            self._mask_B11S = (
                torch.arange(self._longest, device=self._device) < self._indices(ends)[:, None, None, None]
            )

    def _wastes(self, ones: Mapping[int, _Span]) -> bool:
        """Whether a call for each row is faster than one call that reads all rows up to the longest."""
        if len(ones) == 1 or self._device.type != "cpu":
            return len(ones) == 1
        read = (max(ones, default=-1) + 1) * self._longest - sum(span.end for span in ones.values())
        _, _, heads, _, width = self._cache.k_LBHSD.shape
        return read * 2 * heads * width * self._cache.k_LBHSD.element_size() > len(ones) * BYTES_PER_CALL

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def attend(self, layer: int, q_1HND: Tensor, k_1HND: Tensor, v_1HND: Tensor) -> Tensor:
        """Write a layer's new keys and values into the cache, then attend to all positions that each row may see."""
        k_BHSD, v_BHSD = self._cache.k_LBHSD[layer], self._cache.v_LBHSD[layer]
        wide_1HND = q_1HND.to(k_BHSD.dtype)
        if self._is_aligned:
            num, start, end = len(self.spans), self.spans[0].start, self.spans[0].end
            k_BHSD[:num, :, start], v_BHSD[:num, :, start] = k_1HND[0].transpose(0, 1), v_1HND[0].transpose(0, 1)
            q_BH1D, keys, values = wide_1HND.transpose(0, 2), k_BHSD[:num, :, :end], v_BHSD[:num, :, :end]
            return F.scaled_dot_product_attention(q_BH1D, keys, values).transpose(0, 2).to(q_1HND.dtype)
        k_BHSD[self._slots_N, :, self.positions_N] = k_1HND[0].transpose(0, 1).to(k_BHSD.dtype)
        v_BHSD[self._slots_N, :, self.positions_N] = v_1HND[0].transpose(0, 1).to(v_BHSD.dtype)
        if not self._alone:
            return self._attend_together(wide_1HND, k_BHSD, v_BHSD).to(q_1HND.dtype)
        y_1HND = torch.empty_like(wide_1HND)
        for span in self._alone:
            y_1HND[:, :, span.first : span.last] = F.scaled_dot_product_attention(
                wide_1HND[:, :, span.first : span.last],
                k_BHSD[span.slot, None, :, : span.end],
                v_BHSD[span.slot, None, :, : span.end],
                attn_mask=span.mask_TS,
                is_causal=span.start == 0 and span.end > 1,
            )
        if self._longest:
            y_1HND[:, :, self._lines_G] = self._attend_together(wide_1HND, k_BHSD, v_BHSD)
        return y_1HND.to(q_1HND.dtype)

    def _attend_together(self, q_1HND: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
        """Attention of the rows with one new token, `(1, H, G, D)`. Results of slots between theirs are dropped."""
        y_BH1D = F.scaled_dot_product_attention(
            q_1HND[0].transpose(0, 1)[self._lines_B, :, None],
            k_BHSD[: len(self._lines_B), :, : self._longest],
            v_BHSD[: len(self._lines_B), :, : self._longest],
            attn_mask=self._mask_B11S,
        )
        return y_BH1D[self._slots_G, :, 0].transpose(0, 1)[None]
