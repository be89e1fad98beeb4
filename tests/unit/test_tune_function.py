"""The function of a search: what is read from its file, what is refused and how, and which figures count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuadrilla.config import TuneSection
from cuadrilla.errors import ConfigError, CuadrillaError, TaskError
from cuadrilla.jobs.calls import parse_answer
from cuadrilla.runfile import read_run_file, resolve
from cuadrilla.tune.call import MOST_FIGURES, figures_of
from cuadrilla.tune.function import code_sha256, packages_of, read_code, read_function, require_function
from cuadrilla.tune.space import Space

CODE = """
import numpy as np
import beside

def score(depth, *, rate=0.1, seed, budget):
    return beside.it(depth, rate)
"""
SPACE = "[tune.space]\ndepth = {low = 1, high = 9}\nrate = {low = 0.1, high = 1.0}\n"


def section(text: str = SPACE, function: str = "f.py:score", more: str = "") -> TuneSection:
    return resolve(f'[tune]\nfunction = "{function}"\n{more}\n{text}').config.tune


def write(folder: Path, code: str = CODE) -> Path:
    (folder / "f.py").write_text(code)
    (folder / "beside.py").write_text("import f, os.path\ndef it(depth, rate): return depth * rate\n")
    return folder


def test_what_a_trial_is_given(tmp_path: Path) -> None:
    function = read_function(section(more="rungs = 2"), folder=write(tmp_path))
    request = function.request({"depth": 3}, seed=7, budget=0.25)
    assert request["arguments"] == {"depth": 3, "seed": 7, "budget": 0.25}
    assert (request["file"], request["function"]) == (str(tmp_path / "f.py"), "score")


def test_its_code_is_what_it_imports_beside_it_and_what_changes_there_is_seen(tmp_path: Path) -> None:
    code = read_code(write(tmp_path) / "f.py")
    assert list(code) == ["beside.py", "f.py"]
    assert packages_of(code) == {"numpy", "os"}
    (tmp_path / "beside.py").write_text("def it(depth, rate): return 0\n")
    assert code_sha256(read_code(tmp_path / "f.py")) != code_sha256(code)


def test_a_function_that_takes_any_name(tmp_path: Path) -> None:
    write(tmp_path, "def score(**settings): return 1\n")
    assert read_function(section(), folder=tmp_path).request({"depth": 1}, seed=0, budget=1.0)["arguments"] == {
        "depth": 1
    }


@pytest.mark.parametrize(
    ("code", "more", "text", "said"),
    [
        (None, "", SPACE, "cannot read"),
        ("def other(): pass", "", SPACE, "has no `def score"),
        ("score = print", "", SPACE, "has no `def score"),
        ("def score(:", "", SPACE, "is not Python"),
        ("def score(depth): pass", "", SPACE, "tune.space.rate: f.py:score has no such argument"),
        ("def score(depth, rate, data): pass", "", SPACE, "needs data"),
        ("def score(depth, *, rate, data): pass", "", SPACE, "needs data"),
        ("def score(depth, rate, /): pass", "", SPACE, "has no such argument"),
        ("def score(depth, rate): pass", "rungs = 2", SPACE, "no parameter `budget`"),
        ("def score(depth, rate): pass", "tokens = 9", SPACE, "trains on none"),
        (
            "def score(depth, rate): pass",
            "",
            "[tune.space]\ndepth = {choices = [1, 2]}\nrate = {low = 0.1, high = 1.0, when = {depth = 2}}\n",
            "needs rate, which not every trial gives",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, code: str | None, more: str, text: str, said: str) -> None:
    if code is not None:
        (tmp_path / "f.py").write_text(code)
    with pytest.raises((ConfigError, TaskError), match=said) as caught:
        read_function(section(text, more=more), folder=tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tune.space is empty"),
        ("[tune.space]\noptim.lr = {low = 0.1, high = 1.0}\n", "optim.lr: this is no name of an argument"),
        ('[tune.space]\n"max-depth" = {low = 1, high = 2}\n', "max-depth: this is no name of an argument"),
        ("[tune.space]\nlambda = {low = 1, high = 2}\n", "lambda: this is no name of an argument"),
        ("[tune.space]\na = {low = 1, high = 2, when = {b = 1}}\n", "`when` names b"),
    ],
)
def test_names_that_are_no_arguments_are_refused(text: str, said: str) -> None:
    config = resolve(f'[tune]\nfunction = "f.py:score"\n{text}').config
    with pytest.raises(ConfigError, match=said) as caught:
        Space(config.tune, config)
    assert caught.value.hint


@pytest.mark.parametrize("function", ["f.py", "score", "f.py:a-b", ":score", "f.py:"])
def test_no_name_of_a_function(function: str) -> None:
    with pytest.raises(ConfigError, match=r"tune\.function"):
        section(function=function)


def test_such_a_run_file_needs_no_data_and_has_nothing_to_train(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'[tune]\nfunction = "f.py:score"\n{SPACE}')
    with pytest.raises(ConfigError, match="there is nothing to train") as caught:
        read_run_file(run_file)
    assert caught.value.hint == f"cuadrilla tune {run_file}"
    assert read_run_file(run_file, to_train=False).config.tune.function == "f.py:score"


@pytest.mark.parametrize(
    ("returned", "figures"),
    [
        (0.5, {"score": 0.5}),
        (3, {"score": 3.0}),
        (np.float32(0.5), {"score": 0.5}),
        (np.int64(3), {"score": 3.0}),
        ({"score": 1, "nodes": np.float64(2)}, {"score": 1.0, "nodes": 2.0}),
        ({}, {}),
    ],
)
def test_figures(returned: object, figures: dict[str, float]) -> None:
    found = figures_of(returned, name="f")
    assert found == figures
    assert {type(value) for value in found.values()} <= {float}


@pytest.mark.parametrize(
    "returned",
    [
        None,
        True,
        "0.5",
        1j,
        [0.5],
        np.ones(1),
        float("nan"),
        np.float32("inf"),
        10**400,
        {"score": None},
        {"score": 1.0, "other": float("nan")},
        {1: 1.0},
        {"x" * 81: 1.0},
        {str(number): 1.0 for number in range(MOST_FIGURES + 1)},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_figure_is_refused(returned: Any) -> None:
    with pytest.raises(CuadrillaError) as caught:
        figures_of(returned, name="score")
    assert "score returned" in caught.value.message
    assert len(caught.value.message) < 200
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["", "rubbish", "[]", '{"complete": false}', '{"complete": true}', '{"complete": true, "figures": {"score": NaN}}',
     '{"complete": true, "figures": {"score": "1"}, "seconds": 1}', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_answer(text: str) -> None:
    assert parse_answer(text) is None


def test_only_what_the_file_defines_is_called(tmp_path: Path) -> None:
    """Whoever asks: a file that imports `system` gives nobody a shell."""
    code = b"from os import system\nwith_power = eval\n\ndef score(x):\n    return x\n"
    require_function(tmp_path / "f.py", code, name="score")
    for name in ("system", "with_power", "__import__", "score.__globals__"):
        with pytest.raises(TaskError, match="has no `def"):
            require_function(tmp_path / "f.py", code, name=name)
