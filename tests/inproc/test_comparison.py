"""`cuadrilla eval`: a single run, and several models side by side on the same texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.cli.evaluate import evaluate
from cuadrilla.cli.export import export_hf
from cuadrilla.cli.output import options
from cuadrilla.data.folder import read_manifest
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


def test_a_run_and_its_export_have_the_same_figures(
    language: RunDir, exported: Path, tmp_path: Path, as_json: Measure
) -> None:
    (tmp_path / "texto.txt").write_text("La niña fue a la plaza.\n\n" * 3)
    assert as_json(language.path, pairs=20)["pairs"] == 20
    # The run was trained in fp32. A model from elsewhere is evaluated in what is fast here, which may be bf16.
    found = as_json(language.path, exported, text=[tmp_path / "texto.txt"], pairs=10)
    ours, theirs = found
    assert (ours["version"], theirs["version"]) == (choose_step(language).version, None)
    assert ours["parameters"] == theirs["parameters"]
    names = [(figure["name"], figure["of"], figure["count"]) for figure in ours["figures"]]
    assert names == [
        ("bits_per_byte", "texto.txt", len("La niña fue a la plaza.\n\n".encode()) * 3 - 2),
        ("pairs_right", "built-in stories", 10),
    ]
    for a, b in zip(ours["figures"][:1], theirs["figures"][:1], strict=True):
        assert a["value"] == pytest.approx(b["value"], rel=0.01)
        assert a["value"] == pytest.approx(a["total"] / a["count"])


def test_without_a_text_all_are_measured_on_the_first_runs_held_out_text(
    language: RunDir, exported: Path, as_json: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(exported, language.path)
    val = read_manifest(language.path.parent / "data").splits["val"]
    for model in found:
        (figure,) = model["figures"]
        assert figure["count"] == val.num_bytes
        assert figure["of"] == f"held-out text of {language.path}"
    options.json = False
    evaluate([exported, language.path], device="cpu")
    table = capsys.readouterr().out
    assert "bits per byte" in table
    assert "±" in table


def test_what_cannot_be_compared_is_refused(language: RunDir, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--stories works only with one run"):
        evaluate([language.path, exported], stories=3)
    with pytest.raises(ConfigError, match="is not a run"):
        evaluate([exported])
    with pytest.raises(ConfigError, match="neither a run nor a model"):
        evaluate([tmp_path], pairs=1)
