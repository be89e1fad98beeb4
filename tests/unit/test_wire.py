"""Messages and tensors as bytes: they come back unchanged, and all other bytes are refused."""

import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cuadrilla.link import wire
from cuadrilla.link.wire import DTYPES, Layout, Memory, chunks, received

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
ENTRIES = st.lists(st.tuples(st.sampled_from(list(DTYPES)), SHAPES), max_size=6)
CHUNK_SIZES = st.sampled_from([1, 3, 7, 64, 2**20])
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def tensors_of(entries: list[tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors of any bits, NaNs included."""
    made = {}
    for index, (dtype, shape) in enumerate(entries):
        raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        made[f"t{index}"] = raw.view(dtype).reshape(shape)
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = BITS.get(a.dtype, a.dtype)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(whole), b.view(whole))


@given(ENTRIES, CHUNK_SIZES)
def test_tensors_come_out_bit_for_bit(entries, chunk_bytes) -> None:
    tensors = tensors_of(entries)
    layout = Layout.of(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "CHUNK_BYTES", chunk_bytes)
        found = received(chunks(layout.parts(tensors)), [layout], memory=Memory())
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("by", [slice(None, None, 2), slice(1, None)])
def test_tensors_that_do_not_lie_in_one_piece_travel_too(by) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {"turned": whole.t(), "cut": whole[:, by], "alone": torch.tensor(7)}
    layout = Layout.of(tensors)
    found = layout.views(bytearray(b"".join(layout.parts(tensors))))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_another_dtype_than_the_layouts_is_converted() -> None:
    tensors = {"a": torch.tensor([1.5, -2.0])}
    layout = Layout((("a", torch.bfloat16, (2,)),))
    assert bytes(layout.pack(tensors)) == b"".join(layout.parts(tensors))


def test_memory_is_used_again_only_when_no_tensor_lies_in_it() -> None:
    layout, memory = Layout.of({"a": torch.zeros(4), "b": torch.zeros(4)}), Memory()
    zeros = {"a": torch.zeros(4), "b": torch.zeros(4)}
    packed = layout.pack(zeros, memory=memory)
    tensors = layout.views(packed)
    address, kept = tensors["a"].data_ptr(), tensors["b"].view(2, 2)[1]
    del packed, tensors
    gc.collect()
    other = layout.views(layout.pack(zeros, memory=memory))
    assert other["a"].data_ptr() != address
    del kept
    gc.collect()
    assert layout.views(layout.pack(zeros, memory=memory))["a"].data_ptr() == address
