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
