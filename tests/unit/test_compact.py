"""Numbers of 8 bits: how near they come, what they take, and what is not finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.sync.compact import BLOCK, MAX_CODE, SCALE, compacted, expanded, names_of
from cuadrilla.sync.strategy import SQUARE

W2 = f"{SQUARE}w"


@given(st.integers(1, 5), st.integers(-30, 30), st.integers(0, 2**31))
def test_an_error_is_half_a_code_of_its_block(rows: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn((rows, 1027), generator=generator) * 2.0**exponent
    sent = compacted({"w": tensor})
    assert (sent["w"].dtype, sent["w"].shape) == (torch.int8, tensor.shape)
    assert sent[SCALE + "w"].dtype == torch.bfloat16
    assert sum(t.numel() * t.itemsize for t in sent.values()) <= tensor.numel() * (1 + 2 / BLOCK) + 2
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    largest = flat.abs().amax(1, keepdim=True).expand_as(flat).reshape(-1)[: tensor.numel()].view_as(tensor)
    assert bool(((expanded(sent, "w") - tensor).abs() <= largest / MAX_CODE * 0.51).all())


def test_zeros_stay_zero_and_small_tensors_whole() -> None:
    tensors = {"zeros": torch.zeros(2048), "small": torch.randn(1000), "step": torch.tensor(7.0)}
    sent = compacted(tensors)
    assert names_of(sent) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(expanded(sent, name), tensor)


def test_halves_are_those_named() -> None:
    """A parameter may be called "o", as the optimizer's state begins."""
    sent = compacted({"o": torch.rand(2048), "optimizer state: o": torch.rand(2048)}, halves=("o",))
    assert sent["o"].dtype == torch.bfloat16
    assert SCALE + "o" not in sent
    assert expanded(sent, "o").dtype == torch.float32
    assert sent["optimizer state: o"].dtype == torch.int8


@pytest.mark.parametrize(
    ("name", "bad"),
    [("w", float("nan")), ("w", float("inf")), ("w", -float("inf")), (W2, float("nan")), (W2, float("inf"))],
)
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    tensor = torch.rand(2048)
    tensor[77] = bad
    sent = compacted({name: tensor})
    assert not all(bool(torch.isfinite(t).all()) for t in sent.values())
    assert not bool(torch.isfinite(expanded(sent, name)).all())


@given(st.integers(-30, 10), st.integers(0, 2**31))
def test_an_error_of_a_square_is_a_part_of_itself(exponent: int, seed: int) -> None:
    """Also where its neighbours are a billion times as large."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.rand((5, 1027), generator=generator) ** 8 * 2.0**exponent
    tensor[:, ::7] = 0.0
    sent = compacted({W2: tensor})
    assert sent[W2].dtype == torch.uint8
    come = expanded(sent, W2)
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    largest = flat.amax(1, keepdim=True).expand_as(flat).reshape(-1)[: tensor.numel()].view_as(tensor)
    coded = tensor >= largest * 2.0**-30
    assert bool(((come - tensor).abs() <= 0.0627 * tensor)[coded].all())
    assert bool((come[~coded] <= largest[~coded] * 1.07 * 2.0**-30).all())
    assert bool((come[:, ::7] == 0).all())
