"""`cuadrilla eval`: one model or several, on the same texts, by the measure of the training."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cuadrilla
from cuadrilla.cli.evaluate import evaluate
from cuadrilla.cli.model import export_hf
from cuadrilla.cli.output import options
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import RunDir
from cuadrilla.train.checkpoint import choose_step

Measure = Callable[..., Any]


@pytest.fixture(scope="session")
def exported(language: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export_hf(language.path, to=folder)
    return folder


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Measure:
    def measure(*paths: Path, **wanted: Any) -> Any:
        monkeypatch.setattr(options, "json", True)
        capsys.readouterr()
        evaluate(list(paths), device="cpu", **wanted)
        return json.loads(capsys.readouterr().out)

    return measure


def test_a_run_has_the_figure_of_its_training_alone_and_beside_others(
    language: RunDir, exported: Path, as_json: Measure
) -> None:
    trained = cuadrilla.open_run(language.path).evaluate(device="cpu")
    wanted = {name: trained[name] for name in ("bits_per_byte", "bits_per_byte_error")}
    (alone,), (theirs, ours) = as_json(language.path), as_json(exported, language.path)
    assert ours == alone
    assert ours["measures"] == {f"held-out text of {language.path}": wanted}
    assert (ours["version"], theirs["version"]) == (choose_step(language).version, None)
    assert ours["parameters"] == theirs["parameters"]
    # The run was trained in fp32. A model from elsewhere is evaluated in what is fast here, which may be bf16.
    (found,) = theirs["measures"].values()
    assert found["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=0.01)


def test_texts_stories_and_pairs_are_for_several_models(
    language: RunDir,
    exported: Path,
    tmp_path: Path,
    as_json: Measure,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [tmp_path / "uno.txt", tmp_path / "dos.txt"]
    for number, path in enumerate(texts, start=1):
        path.write_text("La niña fue a la plaza.\n\n" * number)
    names = [*map(str, texts), "built-in stories", "minimal pairs"]
    found = as_json(language.path, exported, text=texts, stories=4, pairs=10)
    for measures in (model["measures"] for model in found):
        assert list(measures) == names
        assert measures["built-in stories"]["faults"] == {"unknown word": 4}  # it has learnt hardly anything
        assert 0 <= measures["minimal pairs"]["pairs_right"] <= 1
    assert list(as_json(exported, pairs=2)[0]["measures"]) == ["minimal pairs"], "there is no held-out text"
    options.json = False
    monkeypatch.setenv("COLUMNS", "400")
    evaluate([exported, language.path], stories=2, device="cpu")
    table = capsys.readouterr().out
    assert all(word in table for word in ("bits per byte", "stories right", "faults", "±", str(exported)))


def test_a_task_of_ones_own_has_its_own_measures(tmp_path: Path, as_json: Measure) -> None:
    shutil.copy(Path(__file__).parents[2] / "examples" / "mlp_regression.py", tmp_path)
    run = cuadrilla.new_run(
        tmp_path / "run", {"task": {"kind": "file", "path": "../mlp_regression.py:mlp"}, "train": {"steps": 2}}
    )
    run.train({"train.device": "cpu"})
    (found,) = as_json(run.path)
    assert found["measures"] == {"held-out data": run.evaluate(device="cpu")}
    with pytest.raises(ConfigError, match="is not a language model"):
        as_json(run.path, stories=1)


def test_what_cannot_be_measured_is_refused(language: RunDir, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        evaluate([exported])
    with pytest.raises(ConfigError, match="neither a run nor a model"):
        evaluate([tmp_path], pairs=1)
