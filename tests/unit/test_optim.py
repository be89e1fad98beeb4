from functools import partial

import pytest
import torch
from torch import nn

from cuadrilla.config import AdamWSection, SGDSection
from cuadrilla.train import optim
from cuadrilla.train.optim import MUON_COEFFICIENTS, MUON_STEPS, Muon, Optimizers, make_optimizer, orthogonalised


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 32), (1, 5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_orthogonalised_gives_each_singular_value_its_polynomial(shape, dtype, tolerance):
    """Compared with the decomposition in float64. Matrices of one batch do not influence each other."""
    scales = torch.tensor([1.0, 1e-3, 1e4])[:, None, None]
    batch = scales * torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    a, b, c = MUON_COEFFICIENTS
    for matrix, found in zip(batch, orthogonalised(batch.to(dtype)), strict=True):
        u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = values / values.norm()
        for _ in range(MUON_STEPS):
            values = a * values + b * values**3 + c * values**5
        assert found.dtype == dtype
        assert torch.linalg.matrix_norm(found.double() - u @ values.diag() @ v, 2) < tolerance
        assert 0.6 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_torchs_muon(dtype, monkeypatch):
    """Same start and same gradients, with mixed shapes: one has more matrices than a batch, one has no gradient."""
    monkeypatch.setattr(optim, "BATCH_NUMBERS", 2 * 72)
    shapes = [(6, 6), (12, 6), (6, 12), (12, 6), (6, 6), (12, 6), (2, 2)]
    rates, after = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, []
    for is_ours in (False, True):
        generator = torch.Generator().manual_seed(1)
        layers = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        named = {str(number): layer for number, layer in enumerate(layers)}
        torchs = partial(torch.optim.Muon, layers, adjust_lr_fn="original")
        optimizer = Muon(named, dtype=dtype, **rates) if is_ours else torchs(**rates)
        for _ in range(5):
            for layer in layers[:-1]:
                layer.grad = torch.randn(layer.shape, generator=generator)
            optimizer.step()
        after.append((layers, optimizer.state))
    (theirs, their_state), (ours, our_state) = after
    slots = {f"{slot}.{number}" for number, layer in enumerate(theirs[:-1]) for slot in their_state[layer]}
    assert our_state.keys() == slots | {f"momentum_buffer.{len(shapes) - 1}"}
    for shape, one, other in zip(shapes, ours, theirs, strict=True):
        moved = 5 * 0.02 * max(1, shape[0] / shape[1]) ** 0.5
        assert (one - other).abs().max() < 0.02 * moved
    assert torch.equal(ours[-1], theirs[-1])


def train_both(section, theirs, *, steps=12):
    """Run our optimizer and torch's on the same layers with the same gradients, and return both results."""
    after = []
    for make in (make_optimizer(section, dtype=torch.float32), theirs):
        generator = torch.Generator().manual_seed(2)
        layers = {
            "weight": nn.Parameter(torch.randn(5, 3, generator=generator)),
            "gain": nn.Parameter(torch.randn(5, generator=generator)),
        }
        optimizer = make(layers)
        for _ in range(steps):
            for parameter in layers.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(*([1.0] if isinstance(optimizer, Optimizers) else []))
        after.append(torch.cat([parameter.detach().flatten() for parameter in layers.values()]))
    return after


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.0), (0.5, 0.1), (0.0, 0.0)])
def test_sgd_is_torchs(momentum, weight_decay):
    section = SGDSection(kind="sgd", lr=0.1, momentum=momentum, weight_decay=weight_decay)

    def theirs(layers):
        groups = [{"params": [layers["weight"]], "weight_decay": weight_decay}, {"params": [layers["gain"]]}]
        return torch.optim.SGD(groups, lr=0.1, momentum=momentum, nesterov=momentum > 0)

    ours, torchs = train_both(section, theirs)
    torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_torchs_bit_by_bit(weight_decay):
    def theirs(layers):
        groups = [{"params": [layers["weight"]]}, {"params": [layers["gain"]], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)

    section = AdamWSection(kind="adamw", lr=0.01, beta1=0.9, beta2=0.95, weight_decay=weight_decay)
    ours, torchs = train_both(section, theirs)
    assert torch.equal(ours, torchs)
