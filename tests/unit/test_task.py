"""Loading a Task from a user's file: the ways that work, and the error of every way that does not."""

import re
import sys
from pathlib import Path

import pytest
import torch

from cuadrilla.errors import TaskError
from cuadrilla.model.task import load_task, loss_of
from cuadrilla.user_file import files_of, load_file

GOOD = """
from dataclasses import dataclass
import torch
from cuadrilla.model.task import TaskDefaults

@dataclass
class Line:
    defaults: TaskDefaults = TaskDefaults(length=1)
    def model(self): return torch.nn.Linear(1, 1)
    def loss(self, model, batch): return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])
    def data(self, split): return [{"x": [1.0], "y": [2.0]}]
    def data_hash(self): return "one point"
    def evaluate(self, model, batches): return {"loss": 0.0}

def line(): return Line()
ready = Line()
half = object()

def of(folder, more=1):
    made = Line()
    made.folder = folder
    return made
"""


def write(folder: Path, text: str, *, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", ["line", "Line", "ready"])
def test_a_function_a_class_or_an_object_gives_the_task(name: str, tmp_path: Path) -> None:
    task = load_task(f"mine.py:{name}", folder=write(tmp_path, GOOD))
    assert task.defaults.length == 1
    assert task.data_hash() == "one point"
    assert sum(parameter.numel() for parameter in task.model().parameters()) == 2


@pytest.mark.parametrize(
    ("text", "spec", "says"),
    [
        (GOOD, "other.py:line", r"other\.py does not exist"),
        (GOOD, "mine.py:lime", r"mine\.py has no 'lime'"),
        (GOOD, "mine.py:half", r"is not a Task: it lacks defaults, model, loss, data, data_hash, evaluate"),
        (GOOD + "def of(size): return Line()", "mine.py:of", r"of\(\) missing 1 required positional argument: 'size'"),
        ("import nothing_like_this", "mine.py:line", r"No module named 'nothing_like_this'"),
        ("def broken(:", "mine.py:line", r"SyntaxError"),
    ],
)
def test_each_mistake_has_its_own_message(text: str, spec: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(spec, folder=write(tmp_path, text))
    assert re.search(says, caught.value.message)
    assert caught.value.hint
    if "has no" in says:
        assert caught.value.hint == "it defines: Line, line, ready, of"  # and not what it imports


def test_files_of_one_name_have_their_own_modules_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folders = [tmp_path / name for name in ("uno", "dos")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        write(folder, f"NUMBER = {number}\n", name="beside.py")
        write(folder, "import beside\nnumber = beside.NUMBER\n")
    modules = [load_file(folder / "mine.py") for folder in (*folders, folders[0])]
    assert [module.number for module in modules] == [0, 1, 0]
    assert modules[0].__name__ != modules[1].__name__
    for folder in folders:
        assert files_of(folder / "mine.py") == [folder / "mine.py", folder / "beside.py"]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("total", "returned tensor"),
        ("(total.detach(), 3)", r"returned \(tensor\([^,]*\), 3\)"),
        ("(total.expand(2), 3)", r"returned \(tensor\(\["),
        ("(total, -1)", r"-1\)"),
    ],
)
def test_a_loss_that_is_not_a_sum_and_a_count_is_refused(returned: str, says: str, tmp_path: Path) -> None:
    text = GOOD.replace(
        'return (model(batch["x"])', f'total = model(batch["x"]).sum(); return {returned}; (model(batch["x"])'
    )
    task = load_task("mine.py:line", folder=write(tmp_path, text))
    with pytest.raises(TaskError, match=rf"Line\.loss .*{says}"):
        loss_of(task, task.model(), {"x": torch.ones(1, 1), "y": torch.ones(1, 1)})


def test_a_task_with_data_gets_their_path_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_task("mine.py:of", folder=Path(), data="digits/").folder == tmp_path / "digits"  # type: ignore[attr-defined]
    for name in ("line", "ready"):
        with pytest.raises(TaskError, match=r"takes 0 positional arguments|not callable"):
            load_task(f"mine.py:{name}", folder=tmp_path, data="digits")
    with pytest.raises(TaskError, match=r"missing 1 required positional argument: 'folder'"):
        load_task("mine.py:of", folder=tmp_path)
