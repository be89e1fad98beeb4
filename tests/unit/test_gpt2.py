"""GPT-2: the loss and its gradients against plain torch, precision, checkpointing, dropout, compilation."""

import math

import pytest
import torch
import torch.nn.functional as F

from cuadrilla.model import kernels
from cuadrilla.model.gpt2 import GPT2, GPT2Config

ODD_VOCABULARY = 1003


def tiny(*, context: int = 40, seed: int = 0, **changes: object) -> GPT2:
    torch.manual_seed(seed)
    sizes: dict = {"vocab_size": ODD_VOCABULARY, "context": context, "layers": 2, "heads": 4, "width": 32, **changes}
    return GPT2(GPT2Config(**sizes))


def batch(length: int = 40, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ODD_VOCABULARY, (rows, length), generator=generator)
    targets = torch.randint(ODD_VOCABULARY, (rows, length), generator=generator)
    targets[0, :5] = -100
    targets[-1, -1] = -100
    return ids, targets


def reference_model_loss(model: GPT2, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss written in plain torch, with the parameters of our model in their own dtype."""
    p = dict(model.named_parameters())
    x = F.embedding(ids, p["transformer.wte.weight"]) + p["transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(model.config.layers):
        h = f"transformer.h.{layer}."
        y = F.layer_norm(x, x.shape[-1:], p[h + "ln_1.weight"], p[h + "ln_1.bias"])
        y = F.linear(y, p[h + "attn.c_attn.weight"], p[h + "attn.c_attn.bias"])
        q, k, v = (z.unflatten(-1, (model.config.heads, -1)).transpose(1, 2) for z in y.chunk(3, -1))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(y, p[h + "attn.c_proj.weight"], p[h + "attn.c_proj.bias"])
        y = F.layer_norm(x, x.shape[-1:], p[h + "ln_2.weight"], p[h + "ln_2.bias"])
        y = F.gelu(F.linear(y, p[h + "mlp.c_fc.weight"], p[h + "mlp.c_fc.bias"]), approximate="tanh")
        x = x + F.linear(y, p[h + "mlp.c_proj.weight"], p[h + "mlp.c_proj.bias"])
    x = F.layer_norm(x, x.shape[-1:], p["transformer.ln_f.weight"], p["transformer.ln_f.bias"])
    logits = x @ p["transformer.wte.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def gradients(model: GPT2, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows in a chunk, so that there are several groups of chunks and an incomplete last one."""
    monkeypatch.setitem(kernels.CHUNK_NUMBERS, "cpu", 7 * ODD_VOCABULARY)


@pytest.mark.usefixtures("small_chunks")
def test_fp32_loss_and_every_gradient_equal_plain_torch_in_float64() -> None:
    model, (ids, targets) = tiny(), batch()
    loss = model.loss(ids, targets)
    found = gradients(model, loss)
    exact = tiny().double()
    expected_loss = reference_model_loss(exact, ids, targets)
    expected = gradients(exact, expected_loss)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert {name: relative(found[name], expected[name]) < 1e-5 for name in expected} == dict.fromkeys(expected, True)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ignored_targets_leave_no_trace(dtype: torch.dtype) -> None:
    """A row without targets that count has no gradient, whatever its values. If all are ignored the loss is 0."""
    model, (ids, targets) = tiny(), batch()
    model.compute_dtype = dtype
    ignored = torch.full_like(targets, -100)
    with_row = model.loss(torch.cat([ids, ids.flip(1)]), torch.cat([targets, ignored]))
    without = model.loss(ids, targets)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = gradients(model, without)["transformer.wte.weight"]
    assert with_row.item() == pytest.approx(without.item(), rel=1e-6)
    assert relative(gradients(model, with_row)["transformer.wte.weight"], expected) < tolerance
    nothing = model.loss(ids, ignored)
    assert nothing.item() == 0
    assert all(not gradient.any() for gradient in gradients(model, nothing).values())


def test_confident_wrong_predictions_have_a_finite_exact_loss() -> None:
    """Probabilities below fp32's smallest number must not become log(0)."""
    x, weight = torch.tensor([[200.0, 0.0]], requires_grad=True), torch.eye(2, requires_grad=True)
    loss = kernels.chunked_cross_entropy(x, weight, torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(200.0)
    assert x.grad.tolist() == [[1.0, -1.0]]


@pytest.mark.usefixtures("small_chunks")
def test_bf16_agrees_with_fp32_as_far_as_bf16_goes() -> None:
    model, (ids, targets) = tiny(), batch()
    exact_loss = model.loss(ids, targets)
    exact = gradients(model, exact_loss)
    model.compute_dtype = torch.bfloat16
    loss = model.loss(ids, targets)
    found = gradients(model, loss)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-4)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    weights = [name for name in exact if name.endswith("weight") and ".ln_" not in name]
    assert {name: relative(found[name], exact[name]) < 0.02 for name in weights} == dict.fromkeys(weights, True)


@pytest.mark.parametrize("length", [1, 64, 127, 300, 600])
@pytest.mark.parametrize("keep", [0, 1024])
def test_block_attention_equals_torchs_in_fp32(length: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KEEP_PROBABILITIES_UP_TO", keep)
    generator = torch.Generator().manual_seed(2)
    qkv = [torch.randn(2, 3, length, 8, generator=generator, requires_grad=True) for _ in range(3)]
    direction = torch.randn(2, 3, length, 8, generator=generator)
    found = kernels.attend_in_blocks(*qkv)
    expected = F.scaled_dot_product_attention(*qkv, is_causal=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found, qkv, direction), torch.autograd.grad(expected, qkv, direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_initial_weights_have_gpt2s_spread() -> None:
    model = tiny(width=128, layers=8)
    block = model.transformer.h[3]
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert not block.mlp.c_fc.bias.any()
    assert block.ln_1.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recomputed_activations_give_the_same_bits(dropout: float) -> None:
    found = []
    for recompute in (False, True):
        model = tiny(dropout=dropout)
        model.recompute = recompute
        torch.manual_seed(3)
        loss = model.loss(*batch())
        found.append({"loss": loss.detach(), **gradients(model, loss)})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# Dynamo does itself what torch warns of: it instantiates `autograd.Function` and looks at `.grad` of activations.
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)
@pytest.mark.parametrize(("dtype", "thrifty"), [(torch.float32, True), (torch.bfloat16, False)])
def test_compiled_blocks_compute_the_same(dtype: torch.dtype, thrifty: bool) -> None:
    """Traced by Dynamo and AOTAutograd, without the code generator of Inductor (which needs a compiler)."""
    ids, targets = batch()
    plain, compiled = tiny(), tiny()
    plain.compute_dtype = compiled.compute_dtype = dtype
    compiled.recompute = thrifty
    for block in compiled.transformer.h:
        block.compile(backend="aot_eager")
    expected, found = plain.loss(ids, targets), compiled.loss(ids, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6 if dtype == torch.float32 else 1e-4)
    a, b = gradients(plain, expected), gradients(compiled, found)
    name = "transformer.h.0.attn.c_attn.weight"
    assert relative(b[name], a[name]) < (1e-5 if dtype == torch.float32 else 2e-2)
