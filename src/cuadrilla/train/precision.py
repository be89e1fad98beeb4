"""Which arithmetic a device computes in, and why. Weights and optimizer state stay in fp32 everywhere."""

import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from cuadrilla.errors import DeviceError
from cuadrilla.host.facts import cpu_flags
from cuadrilla.messages import Message

BF16_CUDA_CAPABILITY = (8, 0)
FP16_CUDA_CAPABILITY = (6, 0)
INITIAL_FP16_SCALE = 2.0**16
_DEVICE = re.compile(r"cpu|mps|(cuda|xpu)(:(0|[1-9][0-9]?))?")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`loss_scale` is 1 but for fp16, where it starts high and is halved on overflow."""

    dtype: torch.dtype
    reason: str
    loss_scale: float = 1.0

    def apply(self, model: nn.Module) -> None:
        """Models that know `compute_dtype` (ours) cast by themselves; all others run under autocast."""
        if hasattr(model, "compute_dtype"):
            setattr(model, "compute_dtype", self.dtype)  # noqa: B010  nn.Module has no such attribute of its own

    def around(self, model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
        """A context for one forward pass."""
        if self.dtype == torch.float32 or hasattr(model, "compute_dtype"):
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    def __str__(self) -> str:
        return Message("{dtype} ({reason})", dtype=str(self.dtype).removeprefix("torch."), reason=self.reason)


def has_accelerator() -> bool:
    return torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()


def choose_device(requested: str) -> torch.device:
    """The device to compute on; `auto` takes cuda, xpu, mps, cpu in that order. Raises DeviceError."""
    available = {
        "cuda": torch.cuda.is_available(),
        "xpu": torch.xpu.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if requested == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not _DEVICE.fullmatch(requested):
        hint = "use auto, cpu, cuda, cuda:1, mps or xpu"
        raise DeviceError("{device!r} is not a device", device=requested, hint=hint)
    device = torch.device(requested)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not available[device.type] or (device.index or 0) >= count:
        raise DeviceError(
            "device {device} is not available in this installation",
            device=requested,
            hint="see `cuadrilla doctor`, or use auto",
        )
    return device


def choose_precision(requested: str, *, device: torch.device) -> Precision:
    """`requested` is auto, fp32, bf16 or fp16. Raises DeviceError for what the device cannot do."""
    if requested == "fp32":
        return Precision(dtype=torch.float32, reason=Message("asked for"))
    if requested == "bf16":
        return Precision(dtype=torch.bfloat16, reason=Message("asked for"))
    if requested == "fp16":
        if device.type == "cpu":
            raise DeviceError("fp16 is not useful on a CPU", hint="use auto, bf16 or fp32")
        return Precision(dtype=torch.float16, reason=Message("asked for"), loss_scale=INITIAL_FP16_SCALE)
    match device.type:
        case "cuda":
            return choose_for_cuda(torch.cuda.get_device_capability(device))
        case "cpu":
            return choose_for_cpu(cpu_flags())
        case "xpu":
            return Precision(dtype=torch.bfloat16, reason="XPU")
        case _:
            return Precision(
                dtype=torch.float32, reason=Message("{device}: bf16 is no faster there", device=device.type)
            )


def choose_for_cuda(capability: tuple[int, int]) -> Precision:
    """bf16 where the tensor cores have it, fp16 where half precision is fast at all."""
    name = Message("CUDA, compute capability {major}.{minor}", major=capability[0], minor=capability[1])
    if capability >= BF16_CUDA_CAPABILITY:
        return Precision(dtype=torch.bfloat16, reason=name)
    if capability >= FP16_CUDA_CAPABILITY:
        reason = Message("{device}: no bf16", device=name)
        return Precision(dtype=torch.float16, reason=reason, loss_scale=INITIAL_FP16_SCALE)
    return Precision(dtype=torch.float32, reason=Message("{device}: no fast half precision", device=name))


def choose_for_cpu(instruction_sets: Collection[str]) -> Precision:
    """bf16 only where the processor multiplies it natively; emulated it is slower than fp32."""
    if "amx_bf16" in instruction_sets:
        return Precision(dtype=torch.bfloat16, reason=Message("CPU with AMX"))
    if "avx512_bf16" in instruction_sets:
        return Precision(dtype=torch.bfloat16, reason=Message("CPU with AVX512-BF16"))
    return Precision(dtype=torch.float32, reason=Message("CPU without native bf16"))
