"""Which device and which arithmetic are chosen for a machine, and which choices are refused."""

import pytest
import torch
from torch import nn

from cuadrilla.errors import DeviceError
from cuadrilla.train.precision import (
    INITIAL_FP16_SCALE,
    choose_device,
    choose_for_cpu,
    choose_for_cuda,
    choose_precision,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["", "gpu", "meta", "cuda:", "cuda:-1", "cuda:01", "CPU", "cpu\n"])
def test_a_device_that_does_not_exist_is_refused(name: str) -> None:
    assert str(choose_device("cpu")) == "cpu"
    with pytest.raises(DeviceError, match="is not available") as caught:
        choose_device(name)
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("instruction_sets", "said"),
    [
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16"), "bfloat16 (CPU with AMX)"),
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16 (CPU with AVX512-BF16)"),
        (("avx2", "avx512f", "avx512_vnni"), "float32 (CPU without native bf16)"),
        (("amx_tile", "amx_int8"), "float32 (CPU without native bf16)"),
    ],
)
def test_a_processor_computes_in_bf16_only_if_it_multiplies_it(instruction_sets: tuple[str, ...], said: str) -> None:
    chosen = choose_for_cpu(instruction_sets)
    assert (str(chosen), chosen.loss_scale) == (said, 1)


@pytest.mark.parametrize(
    ("capability", "dtype", "loss_scale"),
    [
        ((8, 0), torch.bfloat16, 1),
        ((6, 0), torch.float16, INITIAL_FP16_SCALE),
        ((5, 2), torch.float32, 1),
    ],
)
def test_a_card_computes_in_what_its_capability_has(
    capability: tuple[int, int], dtype: torch.dtype, loss_scale: float
) -> None:
    chosen = choose_for_cuda(capability)
    assert (chosen.dtype, chosen.loss_scale) == (dtype, loss_scale)
    assert f"compute capability {capability[0]}.{capability[1]}" in chosen.reason


def test_auto_asks_the_processor_and_names_its_reason() -> None:
    chosen = choose_precision("auto", device=CPU)
    assert chosen.reason.startswith("CPU with")
    assert (chosen.dtype == torch.bfloat16) == (chosen.reason != "CPU without native bf16")


@pytest.mark.parametrize(("asked", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_what_was_asked_for_is_taken_whatever_the_processor_has(asked: str, dtype: torch.dtype) -> None:
    chosen = choose_precision(asked, device=CPU)
    assert (chosen.dtype, chosen.reason, chosen.loss_scale) == (dtype, "asked for", 1)


def test_fp16_on_a_processor_is_refused() -> None:
    with pytest.raises(DeviceError, match="fp16 is not useful on a CPU"):
        choose_precision("fp16", device=CPU)


def test_bf16_reaches_the_passes_of_any_model_and_no_weight() -> None:
    layer, chosen = nn.Linear(3, 2), choose_precision("bf16", device=CPU)
    chosen.apply(layer)
    with chosen.around(layer, CPU):
        assert layer(torch.zeros(1, 3)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    assert not hasattr(layer, "compute_dtype")  # only models that have this attribute get it
