"""Which modules are blocks, and that recomputing their activations changes nothing except memory."""

import copy

import pytest
import torch
from torch import nn

from cuadrilla.errors import TaskError
from cuadrilla.model.blocks import blocks_of, recompute


class Part(nn.Module):
    def __init__(self, width: int = 8, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(self.second(torch.tanh(self.first(x)).sin()))


class Tower(nn.Module):
    """Two lists of blocks, as an encoder and a decoder have; one block has a list of its own."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.left = nn.ModuleList(Part(dropout=dropout) for _ in range(2))
        self.right = nn.ModuleList(nn.Sequential(Part(), Part(dropout=dropout)) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.left:
            x = block(x, scale=0.5)
        for block in self.right:
            x = block(x)
        return self.head(x)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Loss first."""
    torch.manual_seed(3)
    loss = model(x).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_blocks_are_members_of_the_outermost_alike_lists() -> None:
    tower = Tower()
    assert blocks_of(tower) == blocks_of(nn.Sequential(tower, Part())) == [*tower.left, *tower.right]


def test_named_blocks_are_taken_instead_and_a_list_stands_for_its_members() -> None:
    tower = Tower()
    assert blocks_of(tower, named=("right.1", "left", "left.0")) == [tower.right[1], *tower.left]


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])
def test_a_model_without_alike_parts_has_none_of_its_own(model: nn.Module) -> None:
    with pytest.raises(TaskError, match="no list of alike blocks") as caught:
        blocks_of(model)
    assert "TaskDefaults(blocks=" in caught.value.hint


def test_a_name_that_the_model_does_not_have_is_told_with_those_it_has() -> None:
    with pytest.raises(TaskError, match="no module middle") as caught:
        blocks_of(Tower(), named=("left", "middle"))
    assert "embed, left, right, head" in caught.value.hint


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_loss_and_gradients_have_the_same_bits(dropout: float) -> None:
    torch.manual_seed(0)
    plain = Tower(dropout=dropout)
    thrifty = copy.deepcopy(plain)
    recompute(blocks_of(thrifty))
    assert list(thrifty.state_dict()) == list(plain.state_dict())
    x = torch.randn(5, 3)
    for ours, theirs in zip(gradients(thrifty, x), gradients(plain, x), strict=True):
        assert torch.equal(ours, theirs)
