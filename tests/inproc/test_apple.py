"""Training, evaluation and generation use no operation that a Mac's GPU lacks; they run on a stand-in for it."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import cuadrilla
from cuadrilla.data import cuentos
from cuadrilla.link.wire import Layout
from cuadrilla.model.language import wins
from tests import apple
from tests.runs import execute, final, relative_difference
from tests.tasks import Normalised

SETTINGS: Mapping[str, Any] = {
    "data": {"folder": "../data"},
    "model": {"layers": 2, "heads": 2, "width": 16, "context": 256},
    "train": {"steps": 4, "batch_sequences": 4, "unit_sequences": 2, "threads": 1, "precision": "fp32"},
    "checkpoint": {"journal": "on"},
    "evaluate": {"sequences": 4},
    "sample": {"tokens": 8},
}


def trained(folder: Path, device: str, name: str, settings: Mapping[str, Any]) -> cuadrilla.Run:
    run = cuadrilla.new_run(folder / f"{device}-{name}", SETTINGS)
    run.train({**settings, "train.device": device})
    return run


def test_the_stand_in_refuses_what_a_mac_would() -> None:
    with apple.stand_in():
        there = torch.arange(6.0).to("mps")
        assert there.device == torch.device("mps", 0)
        for call in (
            there.double,
            lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
            lambda: there.sum(dtype=torch.float64),
        ):
            with pytest.raises(TypeError, match="MPS framework doesn't support float64"):
                call()
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.arange(6.0)
    assert not torch.backends.mps.is_available()


@pytest.mark.parametrize(("name", "settings"), [("muon", {}), ("strict", {"sync.strict": True})])
def test_a_language_model_trains_and_writes_as_on_a_cpu(folder: Path, name: str, settings: Mapping[str, Any]) -> None:
    """What needs float64 is moved to the CPU. The results must be equal, since the stand-in computes there, too."""
    losses, texts, figures = [], [], []
    for device in ("cpu", "mps"):
        with apple.stand_in() if device == "mps" else nullcontext():
            run = trained(folder, device, name, settings)
            losses.append([row["loss"] for row in run.metrics()] + [run.evaluate(sequences=4, device=device)["loss"]])
            model = cuadrilla.load_model(run.path, device=device)
            texts.append("".join(model.generate("Hola", sampling=cuadrilla.Sampling(max_tokens=12, top_p=0.9))))
            pairs = list(cuentos.minimal_pairs(4, seed=1))
            found = model.evaluate(list(cuentos.stories(2)))
            figures.append([found["bits_per_byte"], *wins(model.model, model.tokenizer, pairs)])
            assert run.train({**settings, "train.device": device, "train.steps": 5}, allow_changes=True).version == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)
    assert texts[0] == texts[1] != ""


def test_a_model_with_running_statistics(tmp_path: Path) -> None:
    execute(tmp_path / "cpu", Normalised())
    with apple.stand_in():
        execute(tmp_path / "mps", Normalised(), 'train.device="mps"')
    assert relative_difference(final(tmp_path / "mps"), final(tmp_path / "cpu")) < 1e-6


def test_its_tensors_travel() -> None:
    with apple.stand_in():
        here = {"a": torch.randn(3, 5), "b": torch.randint(2**40, (7,))}
        there = {name: tensor.to("mps") for name, tensor in here.items()}
        layout = Layout.of(here)
        assert b"".join(layout.parts(there)) == b"".join(layout.parts(here))
        assert bytes(layout.pack(there)) == bytes(layout.pack(here))
        for name, tensor in layout.views(layout.pack(there)).items():
            assert tensor.equal(here[name])
