"""The Python API as in a script or a notebook, on real text and a small model."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import cuadrilla
from tests.runs import final_sha256

MODEL = {"layers": 2, "heads": 2, "width": 16, "context": 64}
TRAIN = {"steps": 6, "batch_sequences": 4, "unit_sequences": 2, "precision": "fp32", "device": "cpu", "threads": 1}
SETTINGS: Mapping[str, Any] = {
    "data": {"folder": "../data"},
    "model": MODEL,
    "train": TRAIN,
    "evaluate": {"sequences": 2},
    "sample": {"tokens": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With prepared `data`."""
    made = tmp_path_factory.mktemp("api")
    options = cuadrilla.PrepareOptions(vocab=400)
    prepared = cuadrilla.prepare(["cuentos:80"], out=str(made / "data"), options=options)
    assert prepared.manifest.splits["train"].num_tokens > 1000
    assert cuadrilla.prepare("cuentos:80", out=made / "data", options=options).already
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> cuadrilla.Run:
    run = cuadrilla.new_run(folder / "trained", SETTINGS)
    assert run.train().complete
    return run


def test_what_is_trained_can_be_read_measured_opened_and_made_to_write(trained: cuadrilla.Run) -> None:
    rows = trained.metrics()
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert trained.config.train.steps == 6
    found = trained.evaluate(sequences=2, newest=True)
    assert found["loss"] == pytest.approx(rows[-1]["val_loss"], rel=1e-5)
    opened = trained.load()
    assert isinstance(opened.model, torch.nn.Module)
    assert sum(parameter.numel() for parameter in opened.model.parameters()) > 5000
    model = cuadrilla.load_model(trained.path)
    pieces = list(model.generate("Había", sampling=cuadrilla.Sampling(max_tokens=12)))
    assert len(pieces) > 1  # as it comes
    assert "".join(pieces) == "".join(model.generate("Había", sampling=cuadrilla.Sampling(max_tokens=12)))


def test_each_step_is_heard_and_a_run_that_stops_goes_on_to_the_same_bits(folder: Path, trained: cuadrilla.Run) -> None:
    run = cuadrilla.new_run(folder / "stopped", (trained.path / "run.toml").read_text())
    heard: list[int] = []

    def on_step(row: Mapping[str, Any]) -> None:
        heard.append(row["version"])
        if row["version"] == 2:
            run.stop()

    stopped = run.train(on_step=on_step)
    assert (stopped.version, stopped.complete) == (2, False)
    assert run.train(on_step=on_step, stop_at=4).version == 4
    assert run.train(on_step=on_step).complete
    assert heard == [1, 2, 3, 4, 5, 6]
    assert final_sha256(run.path) == final_sha256(trained.path)
    run.stop()  # nothing is being trained
    assert run.train().version == 6


def test_ctrl_c_saves_and_raises(folder: Path, trained: cuadrilla.Run) -> None:
    run = cuadrilla.new_run(folder / "interrupted", SETTINGS)
    before = signal.getsignal(signal.SIGINT)

    def on_step(row: Mapping[str, Any]) -> None:
        if row["version"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run.train(on_step=on_step)
    assert signal.getsignal(signal.SIGINT) is before
    assert [row["version"] for row in run.metrics()] == [1, 2, 3]
    assert run.train().complete
    assert final_sha256(run.path) == final_sha256(trained.path)


def test_an_error_of_the_callback_ends_the_training_and_loses_no_step(folder: Path, trained: cuadrilla.Run) -> None:
    run = cuadrilla.new_run(folder / "callback", SETTINGS)

    def on_step(row: Mapping[str, Any]) -> None:
        if row["version"] == 3:
            raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        run.train(on_step=on_step)
    resumed: list[int] = []
    run.train(on_step=lambda row: resumed.append(row["version"]))
    assert resumed[0] in (3, 4)  # the row of step 3 may or may not have been reported
    assert final_sha256(run.path) == final_sha256(trained.path)


def test_settings_are_checked_before_a_folder_is_made(folder: Path, trained: cuadrilla.Run) -> None:
    for settings, words in (
        ({"train": {"batchsize": 3}}, "unknown key train.batchsize"),
        ({"data": 3}, "the settings: data"),
        ({"data": {"folder": 3}}, "the settings: data.folder"),
        ({"train": {"steps": None}}, "the settings: "),
        ("[train", "run.toml"),
    ):
        with pytest.raises(cuadrilla.CuadrillaError, match=words):
            cuadrilla.new_run(folder / "wrong", settings)
    assert not (folder / "wrong").exists()
    with pytest.raises(cuadrilla.CuadrillaError, match="the settings: "):
        trained.train({"train.steps": None})
    with pytest.raises(cuadrilla.CuadrillaError, match=r"unknown key train\.stepz"):
        trained.train({"train": {"stepz": 3}})
    with pytest.raises(cuadrilla.CuadrillaError, match="exists"):
        cuadrilla.new_run(trained.path, SETTINGS)
    with pytest.raises(cuadrilla.CuadrillaError, match="it has no run"):
        cuadrilla.open_run(folder / "data")
    assert "Run" in dir(cuadrilla)
    with pytest.raises(AttributeError, match="trian"):
        cuadrilla.trian  # noqa: B018
