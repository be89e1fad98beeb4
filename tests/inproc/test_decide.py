"""Settings that a run file leaves open are decided by the length of the run, printed, and kept; others stay."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cuadrilla
from cuadrilla.config import AdamWSection, Config, MuonSection
from cuadrilla.data.folder import read_manifest
from cuadrilla.plan.decide import decide, step_tokens, weight_decay
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import as_sets, leaves, read_run_file
from tests.inside import cuadrilla as command
from tests.runs import execute, newest
from tests.tasks import Normalised

SETTINGS: Mapping[str, Any] = {
    "data": {"folder": "../data"},
    "model": {"layers": 1, "heads": 1, "width": 16, "context": 64},
    "train": {"epochs": 2.0, "batch_sequences": 8, "unit_sequences": 8, "threads": 1, "precision": "fp32"},
    "evaluate": {"sequences": 4},
    "sample": {"tokens": 0},
}
QUICK: Mapping[str, Any] = {"evaluate": {"sequences": 4}, "sample": {"tokens": 0}}


def decay_of(run: RunDir) -> float:
    """The weight decay in the newest checkpoint's optimizer."""
    found = newest(run.path)
    decay = json.loads(run.config.read_text())["values"]["optim"]["weight_decay"]
    assert found.state["identity"]["config"]["optim"]["weight_decay"] == decay
    return float(decay)


def decided(folder: Path, made: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """The configuration that is decided for a run which was created with `made` and is trained with `settings`."""
    cuadrilla.new_run(folder, made)
    return decide(read_run_file(folder, sets=as_sets(leaves(settings))).config, RunDir(folder))[0]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ({"kind": "local"}, "exact"),
        ({"kind": "crew", "listen": "127.0.0.1:0"}, "exact"),
        ({"kind": "crew", "listen": "127.0.0.1:0", "link": "100mbit"}, "auto"),
        ({"kind": "crew", "listen": "192.0.2.1:7777"}, "auto"),
    ],
)
def test_windows_are_considered_only_where_steps_cross_a_network(
    tmp_path: Path, engine: Mapping[str, Any], kind: str
) -> None:
    assert decided(tmp_path / "run", {**SETTINGS, "engine": engine}, {}).sync.kind == kind


def test_the_rules() -> None:
    lengths = (1, 300_000, 3_000_000, 10_000_000, 50_000_000, 10**10)
    assert [step_tokens(tokens, alone=True) for tokens in lengths] == [1024, 1024, 1024, 2048, 4096, 16384]
    assert [step_tokens(tokens, alone=False) for tokens in lengths] == [4096, 4096, 4096, 8192, 16384, 16384]
    whole = {"text": 718_496, "weights": 786_432, "epoch_steps": 702, "lr": 0.02}
    assert [weight_decay(epochs, **whole) for epochs in (0.5, 1.99, 2.0, 8, 16)] == [0, 0, 0.051, 0.051, 0.054]
    quarter, little = (whole | {"text": text, "epoch_steps": text / 1024} for text in (185_000, 46_000))
    assert [weight_decay(epochs, **quarter) for epochs in (4, 8, 16)] == [0.21, 0.29, 0.41]
    assert [weight_decay(epochs, **little) for epochs in (4, 8, 16)] == [1.7, 2.0, 2.0]
    assert weight_decay(8, **whole | {"lr": 0.01}) == 0.1
    mini = quarter | {"weights": 12 * 6 * 320**2}
    assert [weight_decay(epochs, **mini) for epochs in (4, 8)] == [0.36, 0.51]
    assert weight_decay(8, **whole | {"epoch_steps": 5}) == 2.0


def test_a_text_that_is_read_twice_is_held_back_and_the_run_keeps_it(folder: Path) -> None:
    cuadrilla.new_run(folder / "twice", {**SETTINGS, "optim": {"lr": 0.05}})
    run, path = RunDir(folder / "twice"), str(folder / "twice")
    shown = command("train", path, "--show-config")
    text = read_manifest(folder / "data").splits["train"].num_tokens
    steps = text / (8 * 64)
    decay = weight_decay(2.0, text=text, weights=12 * 16**2, epoch_steps=steps, lr=0.05)
    assert 0 < decay < 2
    why = f"the text is read 2.0 times, in {steps:.0f} steps each"
    assert ["optim.weight_decay", f"{decay:g}", *why.split()] in [line.split() for line in shown.stdout.splitlines()]
    done = command("train", path, "--stop-at", "3")
    assert "weight_decay" not in done.stderr
    assert f"optim.weight_decay is {decay:g}: {why}" in (run.logs / "log.coordinator.txt").read_text()
    assert decay_of(run) == decay
    done = command("train", path, "--stop-at", "5", "--set", "train.epochs=1.5", "--allow-changes")
    assert "changed" not in done.stderr
    assert decay_of(run) == decay  # as it began


@pytest.mark.parametrize(
    ("name", "settings", "decay"),
    [
        ("once", {"train.epochs": 1.0}, 0.0),
        ("steps", {"train.epochs": 0.0, "train.steps": 10_000, "train.batch_sequences": 16}, 2.0),
        ("none", {"optim.weight_decay": 0.0}, 0.0),
        ("much", {"optim.weight_decay": 1.0}, 1.0),
        ("adamw", {"optim.kind": "adamw"}, 0.1),
    ],
)
def test_what_is_set_holds(folder: Path, name: str, settings: Mapping[str, Any], decay: float) -> None:
    optim = decided(folder / name, SETTINGS, settings).optim
    assert isinstance(optim, MuonSection | AdamWSection)
    assert optim.weight_decay == decay


def test_a_task_of_one_s_own_has_no_rule(tmp_path: Path) -> None:
    execute(tmp_path, Normalised(), "optim.kind=muon", "train.steps=3")
    assert newest(tmp_path).state["identity"]["config"]["optim"]["weight_decay"] == 0.0


def test_batch_and_context_follow_the_length_of_the_run_which_keeps_them(folder: Path) -> None:
    cuadrilla.new_run(folder / "short", {"data": {"folder": "../data"}, "train": {"tokens": 4000}, **QUICK})
    run, path = RunDir(folder / "short"), str(folder / "short")
    shown = {
        line.split()[0]: line.split()[1:]
        for line in command("train", path, "--show-config").stdout.splitlines()
        if line
    }
    assert shown["model.context"] == ["128", "a", "run", "of", "4,000", "tokens"]
    assert shown["train.batch_sequences"] == ["8", "steps", "of", "1,024", "tokens,", "in", "a", "run", "of", "4,000"]
    assert shown["train.unit_sequences"][0] == "1"
    done = command("train", path, "--stop-at", "2")
    assert "train.batch_sequences" not in done.stderr
    assert (
        "train.batch_sequences is 8: steps of 1,024 tokens, in a run of 4,000"
        in (run.logs / "log.coordinator.txt").read_text()
    )
    assert sizes_of(run) == (128, 8, 1)
    done = command("train", path, "--set", "train.tokens=9000000", "--allow-changes", "--stop-at", "3")
    assert "train.batch_sequences" not in done.stderr
    assert sizes_of(run) == (128, 8, 1)  # as it began


@pytest.mark.parametrize(
    ("name", "settings", "sizes"),
    [
        ("said", {"model.context": 32, "train.batch_sequences": 4, "train.unit_sequences": 2}, (32, 4, 2)),
        ("batch", {"train.batch_sequences": 12}, (128, 12, 1)),
        ("odd batch", {"train.batch_sequences": 50}, (128, 50, 1)),
        ("odd context", {"model.context": 100, "engine": {"kind": "crew", "workers": [1.0]}}, (100, 40, 1)),
        ("other weights", {"model.init": "model"}, (0, 32, 8)),
        ("unit", {"train.unit_sequences": 3}, (128, 6, 3)),
        ("length in steps", {"train.tokens": 0, "train.steps": 2}, (0, 32, 8)),
        ("crew", {"engine": {"kind": "crew", "workers": [1.0]}}, (128, 32, 1)),
        ("strict", {"engine": {"kind": "crew", "workers": [1.0]}, "sync.strict": True}, (128, 32, 4)),
    ],
)
def test_what_is_said_holds_and_the_rest_fits(
    folder: Path, name: str, settings: Mapping[str, Any], sizes: tuple[int, int, int]
) -> None:
    config = decided(folder / name, {"data": {"folder": "../data"}, "train": {"tokens": 4000}, **QUICK}, settings)
    assert (config.model.context, config.train.batch_sequences, config.train.unit_sequences) == sizes


def sizes_of(run: RunDir) -> tuple[int, int, int]:
    """Context, batch and unit of its newest checkpoint."""
    found = newest(run.path)
    config = found.state["identity"]["config"]
    return config["model"]["context"], config["train"]["batch_sequences"], config["train"]["unit_sequences"]
