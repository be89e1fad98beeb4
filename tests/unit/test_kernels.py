"""Which kernels are taken: chosen once and kept; whatever is taken computes the same."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cuadrilla.errors import DataError
from cuadrilla.model.generate import for_inference
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.kernels import AS_USUAL, CHUNK_NUMBERS, IGNORED, Kernels, Taught, chunked_cross_entropy, has_onednn
from cuadrilla.model.ready import WAYS, ReadyKernels
from cuadrilla.train import inference, kernels
from cuadrilla.train.inference import InferenceChoice, bits_per_byte_of, choose_for_inference
from cuadrilla.train.kernels import LONG_PASS_TOKENS, PASS_TOKENS, KernelChoice, choose_kernels

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
CONFIG = GPT2Config(vocab_size=64, context=32, layers=2, heads=4, width=128)


def choose(model: nn.Module, home: Path, *, strict: bool = False, device: torch.device = CPU) -> KernelChoice:
    return choose_kernels(model, device=device, dtype=torch.float32, strict=strict, home=home)


def test_it_is_measured_once_and_says_what_it_found(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    first = choose(GPT2(CONFIG), tmp_path)
    torch.manual_seed(3)
    after = torch.get_rng_state()
    assert set(first.ratios) == {"blocks", "onednn"} if torch._C._has_mkldnn else {"blocks"}
    assert "times as fast" in str(first)
    model = GPT2(CONFIG)
    torch.manual_seed(3)
    with patch.object(kernels, "_measured", side_effect=AssertionError("measured again")):
        assert choose(model, tmp_path) == first
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(before, after)
    assert model.kernels == model.transformer.h[1].mlp.c_fc.kernels == model.transformer.h[0].attn.kernels
    assert model.kernels == first.kernels


@pytest.mark.parametrize(("speed_up", "tokens"), [(1.02, PASS_TOKENS), (1.04, LONG_PASS_TOKENS)])
def test_in_bf16_long_passes_are_taken_where_they_are_faster(tmp_path: Path, speed_up: float, tokens: int) -> None:
    def speed_of(dtype: torch.dtype) -> KernelChoice:
        with patch.object(kernels, "_speed_up", return_value=speed_up):
            return choose_kernels(GPT2(CONFIG), device=CPU, dtype=dtype, strict=False, home=tmp_path)

    found = speed_of(torch.bfloat16)
    assert found.pass_tokens == tokens
    assert found.ratios["passes"] == speed_up
    assert speed_of(torch.float32).pass_tokens == PASS_TOKENS
    kept = choose_kernels(GPT2(CONFIG), device=CPU, dtype=torch.bfloat16, strict=False, home=tmp_path)
    assert kept == found
    measured = choose_kernels(GPT2(CONFIG), device=CPU, dtype=torch.bfloat16, strict=False, home=tmp_path / "anew")
    assert measured.ratios.keys() == {"fused", "passes"}
    assert all(ratio > 0 for ratio in measured.ratios.values())


def test_a_choice_of_before_there_were_long_passes_holds(tmp_path: Path) -> None:
    first = choose(GPT2(CONFIG), tmp_path)
    path = tmp_path / "kernels.json"
    kept = json.loads(path.read_text())
    for row in kept["choices"].values():
        del row["pass_tokens"]
    path.write_text(json.dumps(kept))
    assert choose(GPT2(CONFIG), tmp_path) == first


def test_a_measurement_draws_no_random_numbers_and_leaves_the_threads(tmp_path: Path) -> None:
    model = GPT2(CONFIG)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    choose(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_of_two_that_measure_at_once_the_first_one_holds(tmp_path: Path) -> None:
    other = KernelChoice(kernels=Kernels(onednn=False, blocks=True), ratios={"onednn": 2.0, "blocks": 3.0})
    mine = KernelChoice(kernels=AS_USUAL, ratios={"blocks": 0.5})

    def measure(_model: GPT2, _dtype: torch.dtype) -> KernelChoice:
        with patch.object(kernels, "_measured", return_value=other):
            choose(GPT2(CONFIG), tmp_path)
        return mine

    with patch.object(kernels, "_measured", side_effect=measure):
        assert choose(GPT2(CONFIG), tmp_path) == other


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\0", '{"choices": {"a": {"kernels": {}, "ratios": {}}}}'])
def test_a_file_that_cannot_be_read_is_measured_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "kernels.json").write_text(text)
    found = choose(GPT2(CONFIG), tmp_path)
    assert json.loads((tmp_path / "kernels.json").read_text())
    with patch.object(kernels, "_measured", side_effect=AssertionError):
        assert choose(GPT2(CONFIG), tmp_path) == found


def test_what_must_not_depend_on_a_measurement_is_not_measured(tmp_path: Path) -> None:
    narrow = GPT2(GPT2Config(vocab_size=64, context=32, layers=1, heads=2, width=8))
    with patch.object(kernels, "_measured", side_effect=AssertionError):
        for choice in (
            choose(GPT2(CONFIG), tmp_path, strict=True),
            choose(nn.Linear(200, 200), tmp_path),
            choose(narrow, tmp_path),
            choose(GPT2(CONFIG), tmp_path, device=torch.device("meta")),
        ):
            assert choice == KernelChoice(kernels=AS_USUAL, ratios={})
    assert not list(tmp_path.iterdir())


DTYPES = [
    pytest.param(
        dtype, marks=pytest.mark.skipif(not has_onednn(CPU, dtype), reason=f"this processor has no oneDNN for {dtype}")
    )
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_generates_has_a_choice_of_its_own_in_the_same_file(dtype: torch.dtype, tmp_path: Path) -> None:
    model = GPT2(CONFIG)
    model.compute_dtype = dtype
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    trained = choose(model, tmp_path)
    found = choose_for_inference(model, home=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    usual = ReadyKernels.usual(dtype)
    assert found.ratios["one"].keys() == set(WAYS) - {usual.one}
    assert found.ratios["several"].keys() == set(WAYS) - {usual.several}
    assert ("keys" in found.ratios) == (dtype == torch.bfloat16)
    assert "times as fast" in str(found)
    for_inference(model, kernels=found.kernels)
    with (
        patch.object(kernels, "_measured", side_effect=AssertionError),
        patch.object(inference, "_measured", side_effect=AssertionError),
    ):
        assert choose(model, tmp_path) == trained
        assert choose_for_inference(model, home=tmp_path) == found
    path = tmp_path / "kernels.json"
    kept = json.loads(path.read_text())
    (row,) = kept["inference"].values()
    row["kernels"]["one"] = "magic"
    path.write_text(json.dumps(kept))
    with patch.object(inference, "_measured", return_value=found):
        assert choose_for_inference(model, home=tmp_path) == found
    assert json.loads(path.read_text())["choices"] == kept["choices"]


def test_narrow_models_generate_as_usual(tmp_path: Path) -> None:
    narrow = GPT2(GPT2Config(vocab_size=64, context=32, layers=1, heads=2, width=8))
    usual = ReadyKernels.usual(torch.float32)
    expected = InferenceChoice(kernels=usual, usual=usual, ratios={})
    assert choose_for_inference(narrow, home=tmp_path) == expected
    assert str(expected) == "as usual"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("one", "several", "in_fp32", "in_bf16"),
    [  # tokens a second by torch, oneDNN and with packed weights
        ((100, 102, 102), (100, 102, 102), ("onednn", "onednn"), ("packed", "packed")),
        ((120, 100, 105), (60, 100, 130), ("torch", "packed"), ("torch", "packed")),
        ((104, 100, 100), (60, 100, 130), ("torch", "packed"), ("packed", "packed")),
        ((60, 100, 130), (60, 100, 130), ("packed", "packed"), ("packed", "packed")),
        ((130, 100, 60), (130, 129, 60), ("torch", "onednn"), ("torch", "torch")),
    ],
)
def test_a_way_is_taken_if_it_is_worth_its_memory(
    one: tuple[float, ...], several: tuple[float, ...], in_fp32: tuple[str, str], in_bf16: tuple[str, str]
) -> None:
    """In fp32 only packed weights are a copy, in bf16 each order is one."""
    for dtype, expected in ((torch.float32, in_fp32), (torch.bfloat16, in_bf16)):
        found = inference._chosen(
            dict(zip(WAYS, one, strict=True)),
            dict(zip(WAYS, several, strict=True)),
            usual=ReadyKernels.usual(dtype),
            shares=dtype == torch.float32,
        )
        assert (found.one, found.several) == expected


class Letters:
    """A tokenizer of characters."""

    end_of_text = 0

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % 60 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError


@torch.no_grad()
def test_bits_per_byte_are_those_of_the_plain_formula() -> None:
    model = GPT2(CONFIG)
    text = "año tras año, " * 12
    ids = torch.tensor([0, *Letters().encode(text)])
    nats = 0.0
    for start in range(0, len(ids) - 1, CONFIG.context):
        window = ids[start : start + CONFIG.context + 1]
        nats += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
    expected = nats / math.log(2) / len(text.encode())
    assert bits_per_byte_of(for_inference(model), Letters(), text) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(DataError):
        bits_per_byte_of(for_inference(model), Letters(), "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_of_them_compute_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GPT2(CONFIG)
    model.compute_dtype = dtype
    ids = torch.randint(64, (2, 32))
    found = []
    for taken in (AS_USUAL, Kernels(onednn=False), Kernels(blocks=True), Kernels(blocks=False)):
        model.use(taken)
        model.zero_grad()
        loss = model.loss(ids, ids)
        torch.autograd.backward([loss])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), gradient, model.losses(ids, ids)))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for loss_value, gradient, losses in found[1:]:
        assert loss_value == pytest.approx(found[0][0], rel=tolerance)
        assert (gradient - found[0][1]).norm() <= tolerance * found[0][1].norm()
        assert torch.allclose(losses, found[0][2], rtol=tolerance, atol=tolerance)


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
    taught = Taught(share=0.3, x_NC=[a for a, _ in teachers], weight_VC=[b for _, b in teachers])
    loss = chunked_cross_entropy(x, weight, targets, taught=taught)
    found = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, right in zip(found, wanted, strict=True):
        assert torch.allclose(mine.double(), right.double(), atol=1e-5, rtol=1e-4)
