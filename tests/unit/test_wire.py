"""Tensors as chunks: the same bits come out, and nothing else gets in."""

import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cuadrilla.dtypes import DTYPES
from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.wire import Assembly, Layout, Memory, chunk_messages, chunks

pytestmark = pytest.mark.unit

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
ENTRIES = st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES), max_size=6)
CHUNK_SIZES = st.sampled_from([1, 3, 7, 64, 2**20])
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def tensors_of(entries: list[tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Any bits at all, NaNs included."""
    made = {}
    for index, (dtype, shape) in enumerate(entries):
        raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        made[f"t{index}"] = raw.view(dtype).reshape(shape)
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = BITS.get(a.dtype, a.dtype)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(whole), b.view(whole))


def messages_of(tensors: dict[str, Tensor], *, offset: int = 0) -> list[bytes]:
    layout = Layout.of(tensors)
    return list(chunk_messages("x", layout.parts(tensors), layout=layout, num_bytes=layout.num_bytes, offset=offset))


@given(ENTRIES, CHUNK_SIZES)
def test_tensors_come_out_bit_for_bit(entries, chunk_bytes) -> None:
    tensors = tensors_of(entries)
    layout = Layout.of(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "CHUNK_BYTES", chunk_bytes)
        assembly = Assembly(layout.num_bytes, layout=layout)
        for message in messages_of(tensors):
            assembly.add(pb.Chunk.FromString(message))
    assert assembly.complete
    received = layout.unpack(assembly.buffer)
    assert received.keys() == tensors.keys()
    assert all(same_bits(received[name], tensors[name]) for name in tensors)


@given(ENTRIES, CHUNK_SIZES, st.integers(0, 700))
def test_parts_and_a_packed_copy_are_the_same_messages_from_any_offset(entries, chunk_bytes, offset) -> None:
    tensors = tensors_of(entries)
    layout = Layout.of(tensors)
    packed = layout.pack(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "CHUNK_BYTES", chunk_bytes)
        found = [pb.Chunk.FromString(message) for message in messages_of(tensors, offset=offset)]
        assert found == list(chunks("x", packed, layout=layout, offset=offset))
    assert b"".join(chunk.data for chunk in found) == bytes(packed[offset:])
    assert all(len(chunk.data) <= chunk_bytes for chunk in found)
    assert (found[0].name, found[0].num_bytes) == ("x", len(packed))
    assert not any(chunk.name or chunk.tensors or chunk.num_bytes for chunk in found[1:])


def test_a_message_is_what_protobuf_would_have_written() -> None:
    data = bytes(range(256)) * 3
    (message,) = chunk_messages("x", [data[:100], data[100:]], layout=None, num_bytes=len(data))
    by_protobuf = pb.Chunk(data=data, crc=wire.chunk_of(data).crc, name="x", num_bytes=len(data))
    assert pb.Chunk.FromString(message) == by_protobuf
    assert len(message) == by_protobuf.ByteSize()


@pytest.mark.parametrize("by", [slice(None, None, 2), slice(1, None)])
def test_tensors_that_do_not_lie_in_one_piece_travel_too(by) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {"turned": whole.t(), "cut": whole[:, by], "alone": torch.tensor(7)}
    layout = Layout.of(tensors)
    received = layout.unpack(bytearray(b"".join(layout.parts(tensors))))
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)


def test_another_dtype_than_the_layouts_is_converted() -> None:
    tensors = {"a": torch.tensor([1.5, -2.0])}
    layout = Layout((("a", torch.bfloat16, (2,)),))
    assert bytes(layout.pack(tensors)) == b"".join(layout.parts(tensors))


def begun(num_bytes: int = 8) -> tuple[Assembly, list[pb.Chunk]]:
    return Assembly(num_bytes), list(chunks("x", bytes(range(num_bytes)), layout=None))


def test_a_damaged_chunk_is_refused() -> None:
    assembly, (chunk,) = begun()
    chunk.data = b"\1" + chunk.data[1:]
    with pytest.raises(LinkError, match="checksum"):
        assembly.add(chunk)
    assert not assembly.complete


@pytest.mark.parametrize("announced", [0, 7, 9, 2**63])
def test_nothing_is_allocated_for_another_size(announced, monkeypatch) -> None:
    assembly, (chunk,) = begun()
    chunk.num_bytes = announced
    monkeypatch.setattr(Memory, "take", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(LinkError, match="instead of 8"):
        assembly.add(chunk)
    assert len(assembly.buffer) == 0


def test_nothing_is_allocated_for_another_layout(monkeypatch) -> None:
    theirs, ours = Layout.of({"a": torch.zeros(2)}), Layout.of({"a": torch.zeros(1, 2)})
    monkeypatch.setattr(Memory, "take", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(LinkError, match="another model"):
        Assembly(8, layout=ours).add(next(chunks("x", bytes(8), layout=theirs)))


def test_more_data_than_announced_is_refused() -> None:
    assembly, (chunk,) = begun()
    assembly.add(chunk)
    with pytest.raises(LinkError, match="more data"):
        assembly.add(wire.chunk_of(b"x"))


def test_a_whole_that_ends_early_is_not_complete() -> None:
    tensors = {"a": torch.zeros(wire.CHUNK_BYTES // 4 + 1)}
    first, last = messages_of(tensors)
    layout = Layout.of(tensors)
    assembly = Assembly(layout.num_bytes, layout=layout)
    assembly.add(pb.Chunk.FromString(first))
    assert not assembly.complete
    assembly.add(pb.Chunk.FromString(last))
    assert assembly.complete


def test_memory_is_used_again_only_when_no_tensor_lies_in_it() -> None:
    layout, memory = Layout.of({"a": torch.zeros(4), "b": torch.zeros(4)}), Memory()
    packed = memory.take(layout.num_bytes)
    tensors = layout.unpack(packed)
    address, kept = tensors["a"].data_ptr(), tensors["b"].view(2, 2)[1]
    del packed, tensors
    gc.collect()
    other = layout.unpack(memory.take(layout.num_bytes))
    assert other["a"].data_ptr() != address
    del kept
    gc.collect()
    assert layout.unpack(memory.take(layout.num_bytes))["a"].data_ptr() == address


def test_memory_keeps_no_more_than_it_should() -> None:
    memory = Memory(keep=1)
    taken = [memory.take(16) for _ in range(3)]
    del taken
    gc.collect()
    assert len(memory._free) == 1
    assert len(memory.take(32)) == 32


def test_an_answer_comes_in_pieces_and_is_taken_whole() -> None:
    whole = {"a": torch.zeros(2), "b": torch.ones(3), "c": torch.ones(1)}
    layout = wire.Layout.of(whole)
    uploads = wire.Uploads(layout)
    for piece in ({"a": whole["a"]}, {"b": whole["b"], "c": whole["c"]}):
        uploads.put("lease-1", piece)
    assert uploads.take("lease-1") == whole
    assert uploads.take("lease-1") is None


def test_a_part_of_an_answer_is_none() -> None:
    """Of another lease; with a piece that comes again, which ends what was there: nobody can pile pieces up."""
    whole = {"a": torch.zeros(2), "b": torch.ones(3)}
    uploads = wire.Uploads(wire.Layout.of(whole))
    uploads.put("lease-1", {"a": whole["a"]})
    uploads.put("lease-2", {"b": whole["b"]})
    uploads.put("lease-1", {"b": whole["b"]})
    assert uploads.take("lease-1") is None
    assert uploads.take("lease-2") is None
    uploads.put("lease-3", whole)
    uploads.put("lease-3", {"a": whole["a"]})
    assert uploads.take("lease-3") is None
    assert wire.Uploads(wire.Layout.of(whole)).take("") is None


def test_a_whole_answer_waits_while_pieces_of_the_next_one_arrive() -> None:
    """They come by other threads: the message that belongs to the first answer may be read later."""
    whole = {"a": torch.zeros(2), "b": torch.ones(3)}
    uploads = wire.Uploads(wire.Layout.of(whole))
    uploads.put("lease-1", whole)
    uploads.put("lease-2", {"a": whole["a"]})
    assert uploads.take("lease-1") == whole
    uploads.put("lease-2", {"b": whole["b"]})
    uploads.put("lease-3", {"a": whole["a"]})
    assert uploads.take("lease-2") == whole
    uploads.put("lease-3", {"b": whole["b"]})
    uploads.put("lease-4", whole)
    assert uploads.take("lease-3") is None  # two sets at most
    assert uploads.take("lease-4") == whole


def test_a_piece_is_some_of_the_tensors_in_their_order() -> None:
    layout = wire.Layout.of({"a": torch.zeros(2), "b": torch.ones(3), "c": torch.ones(1)})
    described = layout.describe()
    assert [name for name, *_ in layout.part(described[1:]).entries] == ["b", "c"]
    assert layout.part(described) == layout
    other = wire.Layout.of({"a": torch.zeros(3)}).describe()
    for wrong in ([], described[::-1], [*described, *described], described[:1] * 3, other):
        with pytest.raises(LinkError, match="tensors of another model"):
            layout.part(wrong)
