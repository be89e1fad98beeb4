"""Running statistics: the measurements of a unit, sums without rounding, and one update for each version."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cuadrilla.errors import TaskError
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.sync.kinds import exact
from cuadrilla.sync.statistics import RunningStatistics, UnitStatistics, refuse_private_buffers, with_own_statistics
from cuadrilla.sync.strategy import Sums
from tests.sessions import SOME_LEASE, ConstantGradient, answer_of, recipe_of
from tests.tasks import Checkpointed


def units(count: int, *, seed: int = 0) -> list[Tensor]:
    """Batches of 5 examples with 2 features, far from mean 0 and variance 1."""
    random = torch.Generator().manual_seed(seed)
    return [3 + 2 * torch.randn(5, 2, generator=random) for _ in range(count)]


def mean_of(batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean over units of their means and of their unbiased variances."""
    means, variances = [b.mean(0) for b in batches], [b.var(0) for b in batches]
    return torch.stack(means).mean(0), torch.stack(variances).mean(0)


def measure(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """The statistics that a worker sends after a lease of these units. Its model is not that of record."""
    model = copy.deepcopy(model)
    statistics = UnitStatistics(model)
    for batch in batches:
        model(batch).sum().backward()
        assert statistics.add()
    return dict(statistics.sums)


@pytest.mark.parametrize("momentum", [0.25, None])
def test_a_history_computed_by_hand(momentum: float | None) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=momentum))
    merge = RunningStatistics(model)
    mean, variance = torch.zeros(2), torch.ones(2)
    for version in (1, 2, 3):
        batches = units(5, seed=version)
        merge.step(merge.means([measure(model, batches[:1]), measure(model, batches[1:])]))
        m = 1 / version if momentum is None else momentum
        unit_mean, unit_variance = mean_of(batches)
        mean, variance = (1 - m) * mean + m * unit_mean, (1 - m) * variance + m * unit_variance
        torch.testing.assert_close(model[0].running_mean, mean)
        torch.testing.assert_close(model[0].running_var, variance)
        assert int(model[0].num_batches_tracked) == version
    held_out = torch.tensor([[1.0, -4.0]])
    torch.testing.assert_close(model.eval()(held_out), (held_out - mean) / (variance + 1e-5).sqrt())


class Twice(nn.Module):
    """A BatchNorm that is called twice, once for each half of the input; one that is never called; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.idle, self.frozen = (nn.BatchNorm1d(2, momentum=1.0) for _ in range(3))

    def train(self, mode: bool = True) -> "Twice":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.cat([self.shared(x[:5]), self.shared(x[5:])]))


def test_several_calls_in_a_pass_count_as_their_mean_and_no_call_as_nothing() -> None:
    model = Twice().train()
    with torch.no_grad():
        model.frozen.running_mean.fill_(7)
    merge = RunningStatistics(model)
    halves = units(2)
    merge.step(merge.means([measure(model, [torch.cat(halves)])]))
    mean, variance = mean_of(halves)
    torch.testing.assert_close(model.shared.running_mean, mean)
    torch.testing.assert_close(model.shared.running_var, variance)
    assert int(model.shared.num_batches_tracked) == 1
    assert model.idle.running_mean.tolist() == [0, 0]
    assert model.frozen.running_mean.tolist() == [7, 7]
    assert int(model.idle.num_batches_tracked) == int(model.frozen.num_batches_tracked) == 0


def test_gradient_checkpointing_measures_the_same() -> None:
    batches = units(3)
    found = [measure(kind(nn.Linear(2, 2), nn.BatchNorm1d(2)), batches) for kind in (nn.Sequential, Checkpointed)]
    counts = [int(tensors["1.num_batches_tracked"]) for tensors in found]
    assert counts == [3, 3]
    model = Checkpointed(nn.BatchNorm1d(2))
    means = RunningStatistics(model).means([measure(model, batches)])
    torch.testing.assert_close(means["0.running_mean"], mean_of(batches)[0])
    torch.testing.assert_close(means["0.running_var"], mean_of(batches)[1])


@pytest.mark.parametrize("strict", [False, True])
def test_the_journal_and_a_version_carry_them(strict: bool) -> None:
    """The update that a merge gives to the journal makes the same step in another process; a worker gets the result."""
    models = [nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.Linear(2, 1)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    worker = ExactWorker(models[2], strict=strict)
    strategy, recipe = exact(strict=strict), recipe_of(ConstantGradient)
    merge, redone = (strategy.merge(model, recipe) for model in models[:2])
    for version in (1, 2):
        worker.begin(SOME_LEASE)
        sums = Sums(tokens=10)
        for batch in units(2, seed=version):
            models[2](batch).sum().backward()
            worker.after_micro_step(sums)
        answer = answer_of(worker, tokens=sums.tokens)
        form = strategy.forms(models[0], recipe)[0].contributions[0]
        assert {k: (t.dtype, t.shape) for k, t in answer.contribution.tensors.items()} == {
            k: (t.dtype, t.shape) for k, t in form.items()
        }
        reduced = merge.reduce([answer], planned_tokens=10)
        for one in (merge, redone):
            update = {name: tensor.clone() for name, tensor in reduced.update.items()}
            one.step(update, norm=reduced.norm, version=version, steps=1)
        worker.apply(merge.version(steps=1))
    assert merge.version(steps=1).keys() == strategy.forms(models[0], recipe)[0].version.keys()
    for model in models[1:]:
        assert all(torch.equal(t, models[0].state_dict()[name]) for name, t in model.state_dict().items())
    assert int(models[2][0].num_batches_tracked) == 2


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True)), r"0 \(InstanceNorm1d\)"),
        (lambda: nn.InstanceNorm2d(2, track_running_stats=True), r"the model \(InstanceNorm2d\)"),
    ],
)
def test_statistics_that_cannot_be_merged_are_refused_by_name(make, name: str) -> None:
    with pytest.raises(TaskError, match=name) as caught:
        UnitStatistics(make())
    assert "track_running_stats=False" in caught.value.hint


def test_a_copy_for_measuring_shares_all_tensors_but_the_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.25), nn.Linear(2, 1))
    own = with_own_statistics(model)
    UnitStatistics(own)
    own(units(1)[0]).sum().backward()
    assert all(one is other for one, other in zip(own.parameters(), model.parameters(), strict=True))
    assert model[0].momentum == 0.25
    assert (model[0].running_mean.tolist(), int(model[0].num_batches_tracked)) == ([0, 0], 0)


class Counts(nn.BatchNorm1d):
    """Counts its passes in a saved buffer."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        return super().forward(x)


def test_a_buffer_that_is_not_merged_is_refused_in_a_copy_of_the_model() -> None:
    """Rank 0 of an island that coordinates trains with a copy."""
    model = Counts()
    refuse_private_buffers(model)
    own, batch = with_own_statistics(model), units(1)[0]
    with pytest.raises(TaskError, match="num_passes"):
        own(batch)
    for once_checked in (own, model):
        once_checked(batch)
