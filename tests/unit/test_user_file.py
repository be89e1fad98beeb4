"""Files of the user's: two of one name, and what lies beside them."""

import sys
from pathlib import Path

import pytest

from cuadrilla.user_file import files_of, load_file


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts there goes with it."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def written(folder: Path, number: int) -> Path:
    folder.mkdir()
    (folder / "beside.py").write_text(f"NUMBER = {number}\n")
    (folder / "task.py").write_text("import beside\nnumber = beside.NUMBER\n")
    return folder / "task.py"


def test_files_of_one_name_have_their_own_modules_beside_them(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, number) for number, name in enumerate(("uno", "dos"))]
    modules = [load_file(path) for path in (*paths, paths[0])]
    assert [module.number for module in modules] == [0, 1, 0]
    assert modules[0].__name__ != modules[1].__name__
    for path in paths:
        assert files_of(path) == [path, path.parent / "beside.py"]


def test_what_python_was_told_of_before_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a program that lies beside the file, and the program itself."""
    load_file(written(tmp_path / "antes", 0))
    path = written(tmp_path / "programa", 1)
    sys.path.append(str(path.parent))
    assert load_file(path).number == 1
    known = sys.modules["beside"]
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path.parent / "programa.py"), raising=False)
    load_file(written(tmp_path / "otro", 2))
    assert sys.modules["beside"] is known
    assert "__main__" in sys.modules
    del sys.modules["beside"]
