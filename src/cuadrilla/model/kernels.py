"""Differentiable functions that torch does not have, or that are too slow in torch on a CPU.

* `linear`: casts its weights; fp32 on a CPU uses oneDNN or torch's default library (chosen by `train/precision.py`).
* `attend_in_blocks`: causal attention for bf16 on the CPU.
* `chunked_cross_entropy`: the loss of a linear head, without B*T*V logits (the idea of Liger Kernel, arXiv 2410.10989).

Letters in tensor names: B sequences, T positions, C width, H heads, D = C/H, G = B*H, V vocabulary, N = B*T rows,
I, O features in and out, Q queries and K keys of a block, R rows of a chunk, M rows of several chunks.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuadrilla.host.facts import read_facts

IGNORED = -100


@functools.cache
def is_amd() -> bool:
    return (read_facts().processor or "").startswith("AMD")


def has_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `onednn_linear` can be used. False under torch.compile, because Inductor chooses a kernel by itself."""
    if device.type != "cpu" or not torch._C._has_mkldnn or torch.compiler.is_compiling():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear` by oneDNN, without gradient: the operation that Inductor emits for a frozen linear layer.

    Measured on an AMD Zen 5, oneDNN against the MKL that torch calls: 200 to 95 GFLOP/s in fp32. The weights for a
    single row are read at 23 to 15 GB/s in fp32; in bf16, with packed weights (`inference.py`), at 28 to 13 GB/s.
    """
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight_OI, bias_O, "none", [], "")
    return y


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, onednn: bool = True) -> Tensor:
    """`F.linear` in the dtype of `x`, to which the parameters are cast."""
    if onednn and weight_OI.dtype == x.dtype == torch.float32 and has_onednn(x.device, x.dtype):
        y: Tensor = _OneDNNLinear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return onednn_linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (d_y,) = gradients
        x, weight_OI = ctx.saved_tensors
        d_y_NO, x_NI = d_y.reshape(-1, d_y.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            onednn_linear(d_y_NO, weight_OI.t(), None).view(x.shape) if needs_x else None,
            onednn_linear(d_y_NO.t(), x_NI.t(), None) if needs_weight else None,
            d_y_NO.sum(0) if needs_bias else None,
        )


# Forward and backward pass on 2 cores with AVX512-BF16 (12 heads of 64): 4*256 positions take 24 ms in torch's fused
# CPU kernel and 10 ms in these blocks; 1*1024 positions take 44 and 21 ms. In fp32 either may be faster, depending on
# the processor. Small blocks compute fewer scores that are then masked; large blocks are faster products. So a block
# has 64 queries up to 512 positions, then 128.
QUERY_BLOCK = 64
LONG = 512
KEEP_PROBABILITIES_UP_TO = 1024  # positions; longer sequences compute them again in the backward pass: O(T) memory


def attend_in_blocks(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Causal attention as matrix products of each block of queries with the keys that it may see. Scores are divided
    by sqrt(D)."""
    q_GTD, k_GTD, v_GTD = (x.flatten(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
    y_GTD: Tensor = _BlockAttention.apply(q_GTD, k_GTD, v_GTD)  # type: ignore[no-untyped-call]
    return y_GTD.view(q_BHTD.shape)


def _query_blocks(length: int) -> list[tuple[int, int]]:
    size = QUERY_BLOCK if length <= LONG else 2 * QUERY_BLOCK
    return list(pairwise([*range(0, length, size), length]))


def _probabilities(q_GQD: Tensor, k_GKD: Tensor) -> Tensor:
    """Attention probabilities of the last Q of K positions over all K, `(G, Q, K)`. The softmax is fp32 inside."""
    queries, keys = q_GQD.shape[1], k_GKD.shape[1]
    future_QK = q_GQD.new_full((queries, keys), -1e30).triu_(keys - queries + 1)
    scores_GQK = torch.baddbmm(future_QK, q_GQD, k_GKD.mT, alpha=q_GQD.shape[-1] ** -0.5)
    return torch.softmax(scores_GQK, -1)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_GTD: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> Tensor:
        length, kept = q_GTD.shape[1], []
        y_GTD = torch.empty_like(q_GTD)
        for start, end in _query_blocks(length):
            p_GQK = _probabilities(q_GTD[:, start:end], k_GTD[:, :end])
            y_GTD[:, start:end] = torch.bmm(p_GQK, v_GTD[:, :end])
            if length <= KEEP_PROBABILITIES_UP_TO:
                kept.append(p_GQK)
        ctx.save_for_backward(q_GTD, k_GTD, v_GTD, *kept)
        return y_GTD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (d_y_GTD,) = gradients
        q_GTD, k_GTD, v_GTD, *kept = ctx.saved_tensors
        length, scale = q_GTD.shape[1], q_GTD.shape[-1] ** -0.5
        d_q_GTD, d_k_GTD, d_v_GTD = torch.empty_like(q_GTD), torch.empty(0), torch.empty(0)
        for start, end in reversed(_query_blocks(length)):  # the last block sees all keys: its product begins the sums
            q_GQD, k_GKD, d_y_GQD = q_GTD[:, start:end], k_GTD[:, :end], d_y_GTD[:, start:end]
            p_GQK = kept.pop() if kept else _probabilities(q_GQD, k_GKD)
            d_p_GQK = torch.bmm(d_y_GQD, v_GTD[:, :end].mT)
            d_scores_GQK = torch._softmax_backward_data(d_p_GQK, p_GQK, -1, p_GQK.dtype)
            d_q_GTD[:, start:end] = torch.bmm(d_scores_GQK, k_GKD).mul_(scale)
            d_k_GKD = torch.bmm(d_scores_GQK.mT, q_GQD).mul_(scale)
            d_v_GKD = torch.bmm(p_GQK.mT, d_y_GQD)
            if end == length:
                d_k_GTD, d_v_GTD = d_k_GKD, d_v_GKD
            else:
                d_k_GTD[:, :end] += d_k_GKD
                d_v_GTD[:, :end] += d_v_GKD
        return d_q_GTD, d_k_GTD, d_v_GTD


Read = tuple[Tensor, Tensor]
"""What a model has made of its input: the last hidden states `(N, C)`, and its head `(V, C)`."""


def chunked_cross_entropy(
    x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *,
    onednn: bool = True, teachers: Sequence[Read] = (), share: float = 0.0,
) -> Tensor:  # fmt: skip
    """SUM of the cross-entropies of the logits `x @ weight.T`, without rows whose target is -100. Scalar, fp32.

    With `teachers`, `share` of a row's loss is the cross-entropy with the mean of their probabilities (Hinton et al.
    2015, arXiv 1503.02531, at temperature 1), the rest the one with its target.
    """
    given = (x_NC, weight_VC, targets_N, onednn, teachers, share)
    loss: Tensor = _ChunkedCrossEntropy.apply(*given)  # type: ignore[no-untyped-call]
    return loss


def _mean_probabilities(teachers: Sequence[Read], start: int, end: int, onednn: bool) -> Tensor:
    """The teachers' mean probabilities for rows `start` to `end`, `(R, V)` in fp32."""
    all_logits_RV = (linear(x_NC[start:end], weight_VC, onednn=onednn).float() for x_NC, weight_VC in teachers)
    sums_RV = functools.reduce(Tensor.add_, (torch.softmax(logits_RV, -1) for logits_RV in all_logits_RV))
    return sums_RV.div_(len(teachers))


@torch.no_grad()
def cross_entropies(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, onednn: bool = True) -> Tensor:
    """The cross-entropy of every row, `(N,)` in fp32; 0 where the target is -100."""
    weight_VC = weight_VC.to(x_NC.dtype)
    losses_N = torch.empty(len(x_NC), device=x_NC.device)
    for start, end in _chunks(x_NC, len(weight_VC)):
        logits_RV = linear(x_NC[start:end], weight_VC, onednn=onednn).float()
        losses_N[start:end] = F.cross_entropy(logits_RV, targets_N[start:end], reduction="none", ignore_index=IGNORED)
    return losses_N


# Upper bound of the numbers in a chunk of fp32 logits. On a CPU a chunk must stay below 32 MiB: glibc returns larger
# blocks to the kernel, and page faults then cost more than the softmax. A GPU needs enough rows to be busy.
CHUNK_NUMBERS = {"cpu": 6_500_000}
CHUNK_NUMBERS_ELSEWHERE = 100_000_000
CHUNKS_PER_WEIGHT_GRADIENT = 4  # each product for d(weight) writes V*C numbers, so few large products are faster


def _chunks(x_NC: Tensor, vocab_size: int) -> Iterator[tuple[int, int]]:
    rows = max(CHUNK_NUMBERS.get(x_NC.device.type, CHUNK_NUMBERS_ELSEWHERE) // vocab_size, 1)
    return pairwise([*range(0, len(x_NC), rows), len(x_NC)])


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The forward pass computes the gradients, chunk by chunk; the backward pass only scales them.

    The loss comes from fp32 logits. The log of the normalizer is max(logit) - log(max(p)), which cannot underflow.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, onednn: bool, teachers: Sequence[Read],
        share: float,
    ) -> Tensor:  # fmt: skip
        vocab_size, num_rows = len(weight_VC), len(x_NC)
        head_VC = weight_VC.to(x_NC.dtype)
        chunks = list(_chunks(x_NC, vocab_size))
        rows = chunks[0][1] if chunks else 0
        d_logits_MV = x_NC.new_empty(min(rows * CHUNKS_PER_WEIGHT_GRADIENT, num_rows), vocab_size)
        d_x_NC, d_weight_VC = torch.empty_like(x_NC), torch.zeros_like(weight_VC, dtype=torch.float32)
        ignored_N1 = (targets_N == IGNORED)[:, None]
        targets_N1 = targets_N[:, None].masked_fill(ignored_N1, 0)
        counted_x_NC = x_NC.masked_fill(ignored_N1, 0.0)
        losses_N1 = x_NC.new_empty(num_rows, 1, dtype=torch.float32)
        group = 0
        for start, end in chunks:
            logits_RV = linear(x_NC[start:end], head_VC, onednn=onednn).float()
            d_logits_RV = d_logits_MV[start - group : end - group]
            wanted_RV = _mean_probabilities(teachers, start, end, onednn) if teachers else None
            losses_N1[start:end] = _losses(logits_RV, targets_N1[start:end], d_logits_RV, wanted_RV, share)
            d_x_NC[start:end] = linear(d_logits_RV, head_VC.mT, onednn=onednn)
            if end - group == len(d_logits_MV) or end == num_rows:
                _add_product(d_weight_VC, d_logits_MV[: end - group].mT, counted_x_NC[group:end], onednn)
                group = end
        d_x_NC.masked_fill_(ignored_N1, 0.0)
        ctx.save_for_backward(d_x_NC, d_weight_VC)
        return losses_N1.masked_fill_(ignored_N1, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_loss,) = gradients
        d_x_NC, d_weight_VC = ctx.saved_tensors
        return d_x_NC.mul_(d_loss), d_weight_VC.mul_(d_loss), None, None, None, None


def _losses(
    logits_RV: Tensor, targets_R1: Tensor, d_logits_RV: Tensor, wanted_RV: Tensor | None, share: float
) -> Tensor:
    """The losses of one chunk, `(R, 1)`. The gradient of the logits is written into `d_logits_RV`.

    `wanted_RV`: the teachers' probabilities. The cross-entropy with them is `share` of the loss.
    """
    is_fp32 = d_logits_RV.dtype == torch.float32
    p_RV = torch.softmax(logits_RV, -1, out=d_logits_RV) if is_fp32 else torch.softmax(logits_RV, -1)
    log_normalizer_R1 = logits_RV.amax(-1, keepdim=True) - p_RV.amax(-1, keepdim=True).log()
    p_RV.scatter_add_(1, targets_R1, p_RV.new_full(targets_R1.shape, share - 1.0))
    wanted_logits_R1 = logits_RV.gather(1, targets_R1)
    if wanted_RV is not None:
        p_RV.sub_(wanted_RV, alpha=share)
        expected_R1 = wanted_RV.mul_(logits_RV).sum(-1, keepdim=True)
        wanted_logits_R1 = wanted_logits_R1.mul_(1 - share).add_(expected_R1, alpha=share)
    if not is_fp32:
        d_logits_RV.copy_(p_RV)
    return log_normalizer_R1 - wanted_logits_R1


def _add_product(sum_VC: Tensor, a_VM: Tensor, b_MC: Tensor, onednn: bool) -> None:
    """`sum += a @ b` with the sum in fp32. A CPU adds slices: with mixed dtypes it first copies a product to fp32."""
    rows = len(sum_VC) if sum_VC.device.type != "cpu" else max(CHUNK_NUMBERS["cpu"] // sum_VC.shape[1], 1)
    for start in range(0, len(sum_VC), rows):
        sum_VC[start : start + rows] += linear(a_VM[start : start + rows], b_MC.mT, onednn=onednn)
