"""Linear layers of a copy that generates on a CPU: weights in the form in which few rows read them fastest.

No result has a gradient, and no result of a row depends on other rows, up to the rounding of products of another size.

Letters in tensor names: I, O features in and out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cuadrilla.model.kernels import is_amd, onednn_linear

PACKED_FOR_ROWS = 16
"""On an Intel Xeon with AMX, all matrices of a 124M model in fp32: 16 rows through weights packed for 16 take 60 ms,
through those packed for one 71. With a single row, and in bf16, both are as fast."""


class ReadyLinear:
    """A product with a weight, in a copy that oneDNN has put into the order that it likes.

    A single row in fp32 goes through the weight as it is by what torch calls, but on AMD's processors: on that Xeon
    124M generate 1.16, 10M 1.43 times as many tokens a second.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype) -> None:
        weight_OI = weight_OI.detach().to(dtype)
        self._bias_O = None if bias_O is None else bias_O.detach().to(dtype)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR_ROWS)
        self._for_one_OI = weight_OI if dtype == torch.float32 and not is_amd() else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._for_one_OI is not None and x.numel() == x.shape[-1]:
            return F.linear(x, self._for_one_OI, self._bias_O)
        return onednn_linear(x, self._packed, self._bias_O)
