"""A stand-in for the GPU of a Mac, on any machine: tensors that say they are on `mps`, and refuse what MPS refuses.

They are wrapper subclasses around tensors of the CPU, made like PyTorch's FakeTensor. Every operation goes through
`_run`, which first checks whether MPS would accept it, and then computes it on the CPU.

    float64         does not exist on MPS: no tensor may be created in it or converted to it
    other devices   an operation takes tensors of one device; only copies, indices and 0-dimensional tensors may cross
    numpy, files    need a copy on the CPU, since a wrapper has no memory of its own

Whatever else MPS lacks or computes differently only a Mac can show. Sources: error messages of PyTorch 2.13 in
aten/src/ATen/native/mps; FakeTensor in torch/_subclasses/fake_tensor.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("mps", 0)
ABSENT = (torch.float64, torch.complex128)
MAY_CROSS = ("aten.copy_.default", "aten._to_copy.default", "aten.index.Tensor", "aten.index_put_.default",
             "aten.index_put.default")  # fmt: skip


class OnMac(Tensor):
    """A tensor on the stand-in."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "OnMac":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device="meta",
        )  # fmt: skip
        made.raw = raw
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, call: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(call, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Also sees operations that create or move a tensor and have no wrapper among their arguments."""

    def __torch_dispatch__(
        self, call: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(call, args, kwargs or {})


class _Named(TorchFunctionMode):
    """Sees by what name Python asks for a device. `mps` becomes `mps:0`; PyTorch would ask a driver for the number.

    C++ believes that a wrapper is on `meta`, and puts new tensors there. `meta_asked`: Python itself asks for `meta`.
    """

    meta_asked = 0

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        if function is torch.tensor and _names(kwargs.get("device"), DEVICE.type):  # it bypasses all modes
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if function is Tensor.tolist and isinstance(args[0], OnMac):
            return args[0].cpu().tolist()
        if function in (Tensor.__getitem__, Tensor.__setitem__):  # C++ makes a list a `meta` tensor, without values
            args = (args[0], _with_tensors(args[1]), *args[2:])
        asked = any(_names(value, "meta") for value in (*args, *kwargs.values()))
        _Named.meta_asked += asked
        try:
            return function(*map(_numbered, args), **{key: _numbered(value) for key, value in kwargs.items()})
        finally:
            _Named.meta_asked -= asked


def _with_tensors(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_with_tensors, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _names(value: Any, kind: str) -> bool:
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == kind


def _numbered(value: Any) -> Any:
    return DEVICE if _names(value, DEVICE.type) else value


def _run(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    inside: dict[int, OnMac] = {}  # by the id of what is wrapped
    outside: list[Tensor] = []

    def opened(value: Any) -> Any:
        if isinstance(value, OnMac):
            inside[id(value.raw)] = value
            return value.raw
        if isinstance(value, Tensor):
            outside.append(value)
        return value

    plain_args, plain_kwargs = tree_map(opened, list(args)), tree_map(opened, dict(kwargs))
    asked = kwargs.get("device")
    there = (DEVICE.type,) if _Named.meta_asked else (DEVICE.type, "meta")
    goes_there = torch.device(asked).type in there if asked is not None else bool(inside)
    if inside and any(tensor.is_meta for tensor in outside):
        raise AssertionError(f"{call}: a tensor that has no values, from a way in past this stand-in")
    if asked is not None and goes_there:
        plain_kwargs["device"] = "cpu"
    if inside and str(call) not in MAY_CROSS and any(tensor.dim() for tensor in outside):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found mps:0 and cpu ({call})")
    if goes_there and kwargs.get("dtype") in ABSENT:
        raise _no_float64()
    found = call(*plain_args, **plain_kwargs)

    def closed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in inside:  # computed in place
            return inside[id(value)]
        if not goes_there:
            return value
        if value.dtype in ABSENT:
            raise _no_float64()
        return OnMac(value)

    return tree_map(closed, found)


def _no_float64() -> TypeError:
    return TypeError(
        "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
        " Please use float32 instead."
    )


class _WithoutGradients(torch.no_grad):
    """Replaces `inference_mode`, in which wrappers cannot be sliced."""

    def __init__(self, mode: bool = True) -> None:
        super().__init__()


@contextmanager
def stand_in() -> Iterator[None]:
    """Make `mps` a device in the calling thread."""
    inference = torch.inference_mode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        for name in ("__enter__", "__exit__"):
            patch.setattr(inference, name, getattr(_WithoutGradients, name))
        patch.setattr(inference, "prev", False, raising=False)
        with _Mode(), _Named():
            yield
