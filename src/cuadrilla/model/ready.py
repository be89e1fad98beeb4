"""Linear layers of a copy that generates: weights in the form in which few rows read them fastest, or in int8.

Invariants
* Nothing here has a gradient, and no result of a row depends on other rows, up to the rounding of products of another
  size; in int8 not even that, as its sums are exact.
* `ReadyKernels` only choose among ways that compute the same up to rounding. A way that leaves the weights as they are
  shares them with the model where its dtype is the same.

Letters in tensor names: I, O features in and out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from cuadrilla.errors import DeviceError
from cuadrilla.model.kernels import has_onednn, onednn_linear

Way = Literal["torch", "onednn", "packed"]
"""What torch calls (MKL on x86); oneDNN over weights as they are; oneDNN over a copy in the order that it likes."""
WAYS: tuple[Way, ...] = get_args(Way)
PACKED_FOR_ROWS = 16
"""On an Intel Xeon with AMX, all matrices of a 124M model in fp32: 16 rows through weights packed for 16 take 60 ms,
through those packed for one 71. With a single row, and in bf16, both are as fast."""
MOST_INT8 = 127
TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class ReadyKernels:
    """What a copy computes with on a CPU that has oneDNN. `train/inference.py` measures which is fastest."""

    one: Way
    """For a single row."""
    several: Way
    narrow_keys: bool = False
    """The cache of keys and values is in bf16, where the passes are."""

    @staticmethod
    def usual(dtype: torch.dtype) -> "ReadyKernels":
        way: Way = "packed" if dtype == torch.bfloat16 else "onednn"
        return ReadyKernels(one=way, several=way)


class ReadyLinear:
    """A product with a weight, for one row and for several."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype, kernels: ReadyKernels) -> None:
        bias = None if bias_O is None else bias_O.detach().to(dtype)
        ways = {kernels.one, kernels.several}
        kept: dict[Way, Tensor] = {}
        if ways != {"packed"}:
            kept["torch"] = kept["onednn"] = weight_OI.detach().to(dtype)
        if "packed" in ways:
            kept["packed"] = pack(weight_OI.detach().to(dtype))
        self._one, self._several = (_product(way, kept[way], bias) for way in (kernels.one, kernels.several))

    def __call__(self, x: Tensor) -> Tensor:
        return self._one(x) if x.numel() == x.shape[-1] else self._several(x)


def pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR_ROWS)
    return packed


def _product(way: Way, weight: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    if way == "torch":
        return lambda x: F.linear(x, weight, bias_O)
    return lambda x: onednn_linear(x, weight, bias_O)


class Int8Linear:
    """Weights in int8 with a scale for each output, and rows that are rounded to int8 with a scale of their own.

    The products are exact in int32. 16 rows through the matrices of a 124M model on a Xeon with AMX: 19 ms, bf16 23,
    torch's `_weight_int8pack_mm`, which leaves the rows as they are, 77.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype) -> None:
        weight_OI = weight_OI.detach().float()
        self._scales_O = weight_OI.abs().amax(1).clamp_min_(TINY) / MOST_INT8
        rounded_OI = (weight_OI / self._scales_O[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded_OI, None)
        self._zeros_O = torch.zeros(len(weight_OI), dtype=torch.int32)
        self._bias_O = torch.zeros(len(weight_OI)) if bias_O is None else bias_O.detach().float()
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float()
        scales = x.abs().amax(-1, keepdim=True).clamp_min_(TINY).div_(MOST_INT8)
        rounded = (x / scales).round_().to(torch.int8)
        y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            rounded, 1.0, 0, self._weight, self._scales_O, self._zeros_O, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return torch.addcmul(self._bias_O, y, scales).to(self._dtype)


def check_int8(device: torch.device) -> None:
    """Raises DeviceError where int8 is not multiplied in hardware: it would be slow, and sums might saturate."""
    if not has_onednn(device, torch.float32) or not torch.cpu._is_vnni_supported():
        raise DeviceError("int8 weights need a processor with VNNI", hint="leave int8 out")
