"""A rule chooses the kernels, and all of them compute the same."""

import pytest
import torch

from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.kernels import CHUNK_NUMBERS, IGNORED, chunked_cross_entropy
from cuadrilla.train import precision
from cuadrilla.train.precision import LONG_PASS_TOKENS, PASS_TOKENS, set_up_kernels

CPU = torch.device("cpu")
CONFIG = GPT2Config(vocab_size=64, context=32, layers=2, heads=4, width=128)
WIDE = GPT2Config(vocab_size=64, context=32, layers=1, heads=4, width=516)


@pytest.mark.parametrize(
    ("dtype", "is_amd", "strict", "config", "tokens", "onednn"),
    [
        (torch.float32, True, False, CONFIG, PASS_TOKENS, True),
        (torch.float32, False, False, CONFIG, PASS_TOKENS, False),
        (torch.float32, False, True, CONFIG, PASS_TOKENS, True),
        (torch.bfloat16, False, False, CONFIG, LONG_PASS_TOKENS, None),
        (torch.bfloat16, False, False, WIDE, PASS_TOKENS, None),
        (torch.bfloat16, False, True, CONFIG, PASS_TOKENS, None),
        (torch.bfloat16, True, False, CONFIG, PASS_TOKENS, None),
    ],
)
def test_the_processor_decides_with_what_and_how_long_a_pass_is(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_amd: bool, strict: bool, config: GPT2Config, tokens: int,
    onednn: bool | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(precision, "is_amd", lambda: is_amd)
    model = GPT2(config)
    assert set_up_kernels(model, device=CPU, dtype=dtype, strict=strict) == tokens
    if onednn is not None:
        assert model.onednn == model.transformer.h[-1].mlp.c_fc.onednn == onednn


def test_both_compute_the_same() -> None:
    torch.manual_seed(0)
    model = GPT2(CONFIG)
    ids = torch.randint(64, (2, 32))
    found = []
    for onednn in (True, False):
        model.use(onednn=onednn)
        model.zero_grad()
        loss = model.loss(ids, ids)
        torch.autograd.backward([loss])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), gradient, model.losses(ids, ids)))
    (loss_value, gradient, losses), expected = found
    assert loss_value == pytest.approx(expected[0], rel=1e-5)
    assert (gradient - expected[1]).norm() <= 1e-5 * expected[1].norm()
    assert torch.allclose(losses, expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_part_of_the_loss_is_the_teachers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain formula, in several chunks, with targets that do not count."""
    monkeypatch.setitem(CHUNK_NUMBERS, "cpu", 5 * 11)
    random = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=random, dtype=dtype) for shape in ((23, 7), (11, 7)))
    teachers = [[torch.randn(shape, generator=random, dtype=dtype) for shape in ((23, 5), (11, 5))] for _ in range(3)]
    targets = torch.randint(11, (23,), generator=random)
    targets[3] = targets[22] = IGNORED
    x.requires_grad_(), weight.requires_grad_()
    probabilities = torch.stack([torch.softmax(a @ b.T, -1) for a, b in teachers]).mean(0)
    logs = torch.log_softmax(x @ weight.T, -1)
    counts = targets != IGNORED
    of_text = -logs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    of_teachers = -(probabilities * logs).sum(-1)
    expected = ((0.7 * of_text + 0.3 * of_teachers) * counts).sum()
    wanted = torch.autograd.grad(expected, (x, weight))
    loss = chunked_cross_entropy(x, weight, targets, teachers=teachers, share=0.3)
    found = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, right in zip(found, wanted, strict=True):
        assert torch.allclose(mine.double(), right.double(), atol=1e-5, rtol=1e-4)
