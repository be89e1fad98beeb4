"""Which arithmetic a device computes in, and why. Weights and optimizer state stay in fp32 everywhere.

Our GPT-2 takes its fp32 products from oneDNN on AMD's processors, on others from what torch calls (MKL on x86);
`bench/kernels.py` prints the figures. Passes have 2,048 tokens: longer ones take more memory, and the worker would
answer later. In bf16 each pass casts the weights, and with passes of 4,096 tokens a token takes 8 % less time on an
Intel Xeon with AMX, but more on an AMD EPYC.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from cuadrilla.errors import DeviceError
from cuadrilla.host.facts import cpu_flags
from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.kernels import is_amd

BF16_CUDA_CAPABILITY = (8, 0)
FP16_CUDA_CAPABILITY = (6, 0)
INITIAL_FP16_SCALE = 2.0**16
ASKED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASS_TOKENS, LONG_PASS_TOKENS = 2048, 4096
MAX_LONG_WIDTH = 512
"""Width up to which a model has passes of LONG_PASS_TOKENS: those of wider models take long anyway."""


@dataclass(frozen=True)
class Precision:
    dtype: torch.dtype
    reason: str

    @property
    def loss_scale(self) -> float:
        """1 except for fp16, where it starts high and is halved on overflow."""
        return INITIAL_FP16_SCALE if self.dtype == torch.float16 else 1.0

    def apply(self, model: nn.Module) -> None:
        """Models that know `compute_dtype` (ours) cast by themselves; all others run under autocast."""
        if hasattr(model, "compute_dtype"):
            setattr(model, "compute_dtype", self.dtype)  # noqa: B010  nn.Module has no such attribute of its own

    def around(self, model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
        if self.dtype == torch.float32 or hasattr(model, "compute_dtype"):
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    def __str__(self) -> str:
        return Message("{dtype} ({reason})", dtype=str(self.dtype).removeprefix("torch."), reason=self.reason)


def choose_device(requested: str) -> torch.device:
    """The device to compute on; `auto` takes cuda, xpu, mps, cpu in that order. Raises DeviceError."""
    numbers = {"cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
    available = [
        name for kind, number in numbers.items() if number for name in (kind, *(f"{kind}:{i}" for i in range(number)))
    ]
    available += ["mps", "cpu"] if torch.backends.mps.is_available() else ["cpu"]
    if requested != "auto" and requested not in available:
        raise DeviceError(
            "device {device} is not available in this installation",
            device=requested,
            hint="these are: {devices}; see `cuadrilla doctor`",
            devices=", ".join(available),
        )
    return torch.device(available[0] if requested == "auto" else requested)


def choose_precision(requested: str, *, device: torch.device) -> Precision:
    """`requested` is auto, fp32, bf16 or fp16. Raises DeviceError for what the device cannot do."""
    if requested != "auto":
        if requested == "fp16" and device.type == "cpu":
            raise DeviceError("fp16 is not useful on a CPU", hint="use auto, bf16 or fp32")
        return Precision(ASKED[requested], Message("asked for"))
    match device.type:
        case "cuda":
            return choose_for_cuda(torch.cuda.get_device_capability(device))
        case "cpu":
            return choose_for_cpu(cpu_flags())
        case "xpu":
            return Precision(torch.bfloat16, "XPU")
    return Precision(torch.float32, Message("{device}: bf16 is no faster there", device=device.type))


def choose_for_cuda(capability: tuple[int, int]) -> Precision:
    """bf16 where the tensor cores have it, fp16 where half precision is fast at all."""
    name = Message("CUDA, compute capability {major}.{minor}", major=capability[0], minor=capability[1])
    if capability >= BF16_CUDA_CAPABILITY:
        return Precision(torch.bfloat16, name)
    if capability >= FP16_CUDA_CAPABILITY:
        return Precision(torch.float16, Message("{device}: no bf16", device=name))
    return Precision(torch.float32, Message("{device}: no fast half precision", device=name))


def choose_for_cpu(instruction_sets: Collection[str]) -> Precision:
    """bf16 only where the processor multiplies it natively; emulated it is slower than fp32."""
    if "amx_bf16" in instruction_sets:
        return Precision(torch.bfloat16, Message("CPU with AMX"))
    if "avx512_bf16" in instruction_sets:
        return Precision(torch.bfloat16, Message("CPU with AVX512-BF16"))
    return Precision(torch.float32, Message("CPU without native bf16"))


def set_up_kernels(model: nn.Module, *, device: torch.device, dtype: torch.dtype, strict: bool) -> int:
    """Choose the library for a GPT-2's matrix products on a CPU: the one that is usually the fastest here; in strict
    mode oneDNN on all machines. Returns the limit of tokens in a pass.
    """
    if not isinstance(model, GPT2) or device.type != "cpu":
        return PASS_TOKENS
    if dtype == torch.float32:
        model.use(onednn=strict or is_amd())
    is_long = dtype == torch.bfloat16 and model.config.width <= MAX_LONG_WIDTH and not (strict or is_amd())
    return LONG_PASS_TOKENS if is_long else PASS_TOKENS
