"""Compresses tensors for the wire: to 8 bits in blocks of 64 numbers with a scale, or to bfloat16.

    codes = round(x / scale), in the tensor's own shape;  scale = max |x| / 127 of each 64 numbers in a row
    squares: exponent and 3 bits of the mantissa, relative to those of the block's largest; code 0 is zero

The error of a number is at most 0.4 % of the largest in its block. Squares are divisors, so their error is relative to
themselves: at most 6.3 %, down to 2^-31 of the largest. The same numbers give the same codes on every machine.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from cuadrilla.sync.strategy import SQUARES

BLOCK = 64
MAX_CODE = 127
SCALE = "scale of "
"""Prefix of the name of a tensor's scales."""
FEW_NUMBERS = 1024
"""Tensors with fewer numbers are sent as they are."""
CACHED_BLOCKS = 2**12
"""Blocks that are coded together on a processor: they stay in its cache, which is four times as fast."""
SMALLEST_SCALE = 2.0**-120
"""Its reciprocal is still finite in fp32."""
MAX_SQUARE = 255
DROPPED_BITS = 20
"""Low bits of an fp32 number that a code drops. As integers, positive fp32 numbers have the same order."""
SMALLEST_SQUARE = 2.0**-80


def compacted(tensors: Mapping[str, Tensor], *, bits: int = 8, halves: Collection[str] = ()) -> dict[str, Tensor]:
    """Tensors in 8 bits, or in bfloat16 those named in `halves`; with 32 `bits` the tensors themselves. Those called
    squares hold no negative numbers. A non-finite number makes its scale non-finite.
    """
    if bits == 32:
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.numel() < FEW_NUMBERS:
            found[name] = tensor
        elif name in halves:
            found[name] = tensor.to(torch.bfloat16)
        else:
            codes = _codes_of_squares if name.startswith(SQUARES) else _codes
            found[name], found[SCALE + name] = codes(tensor)
    return found


def expanded(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A compacted tensor in fp32; one that was sent as it is, unchanged."""
    tensor = tensors[name]
    if SCALE + name not in tensors:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    blocks, scales = _in_blocks(tensor), tensors[SCALE + name].float().unsqueeze(1)
    if tensor.dtype == torch.int8:
        return _as(blocks * scales, tensor)
    bits = (blocks.int() - MAX_SQUARE).bitwise_left_shift_(DROPPED_BITS).add_(scales.view(torch.int32))
    return _as(bits.view(torch.float32).masked_fill_(blocks == 0, 0.0), tensor)


def names_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors themselves, without their scales."""
    return [name for name in tensors if not name.startswith(SCALE)]


def _codes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _in_blocks(tensor.detach())
    codes = torch.empty_like(blocks, dtype=torch.int8)
    scales = torch.empty(len(blocks), dtype=torch.bfloat16, device=tensor.device)
    size = min(len(blocks), CACHED_BLOCKS) if tensor.device.type == "cpu" else len(blocks)
    scaled = torch.empty((size, BLOCK), device=tensor.device)  # allocated once: fresh memory costs more than coding
    for first in range(0, len(blocks), size):
        part = slice(first, first + size)
        lowest, highest = torch.aminmax(blocks[part], dim=1)
        scales[part] = torch.maximum(highest, lowest.neg_()).div_(MAX_CODE).clamp_min_(SMALLEST_SCALE)
        factors = scales[part].float().reciprocal_().unsqueeze(1)
        codes[part] = torch.mul(blocks[part], factors, out=scaled[: len(factors)]).round_()
    return _as(codes, tensor), scales


def _codes_of_squares(tensor: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _in_blocks(tensor.detach())
    scales = blocks.amax(1).clamp_min_(SMALLEST_SQUARE).to(torch.bfloat16)
    bits = blocks.view(torch.int32) - scales.float().view(torch.int32).unsqueeze(1)
    codes = bits.add_(1 << DROPPED_BITS - 1).bitwise_right_shift_(DROPPED_BITS).add_(MAX_SQUARE)
    return _as(codes.clamp_(0, MAX_SQUARE).to(torch.uint8), tensor), scales


def _in_blocks(tensor: Tensor) -> Tensor:
    flat, missing = tensor.reshape(-1), -tensor.numel() % BLOCK
    return (nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _as(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.reshape(-1)[: like.numel()].view(like.shape)
