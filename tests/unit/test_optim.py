import pytest
import torch
from torch import nn

from cuadrilla.config import MuonSection
from cuadrilla.train.optim import MuonInFp32, make_optimizer, orthogonalised

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 32), (1, 5)])
def test_orthogonalised_keeps_the_singular_vectors_and_evens_the_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(orthogonalised(matrix, coefficients=COEFFICIENTS, steps=5), full_matrices=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    whole_u, _, whole_v = torch.linalg.svd(matrix, full_matrices=False)
    nearest = whole_u @ whole_v
    assert torch.linalg.matrix_norm(u @ v - nearest, 2) < 1e-3


def test_a_zero_gradient_stays_zero():
    assert not orthogonalised(torch.zeros(3, 4), coefficients=COEFFICIENTS, steps=5).any()


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12)])
def test_fp32_muon_is_torchs_muon_up_to_bf16(shape):
    """Same start, same gradients: only the precision of the iteration differs, and the state has the same names."""
    after = {}
    for kind in (torch.optim.Muon, MuonInFp32):
        generator = torch.Generator().manual_seed(1)
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        optimizer = kind([parameter], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="original")
        for _ in range(5):
            parameter.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        after[kind] = parameter.detach(), set(optimizer.state[parameter])
    (theirs, their_state), (ours, our_state) = after.values()
    moved = 5 * 0.02 * max(1, shape[0] / shape[1]) ** 0.5
    assert (ours - theirs).abs().max() < 0.02 * moved
    assert our_state == their_state


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, MuonInFp32), (torch.bfloat16, torch.optim.Muon)])
def test_the_iteration_is_as_precise_as_the_passes(dtype, kind):
    layers = {"inner": nn.Parameter(torch.ones(2, 3)), "gain": nn.Parameter(torch.ones(3))}
    optimizers = make_optimizer(MuonSection(), is_matrix=lambda _, p: p.ndim == 2, dtype=dtype)(layers)
    assert type(optimizers._parts[0]) is kind
    assert type(optimizers._parts[1]) is torch.optim.AdamW
