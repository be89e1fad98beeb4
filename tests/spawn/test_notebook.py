"""The notebook, cell by cell, in a copied folder, by a real kernel."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        find_spec("nbclient") is None or find_spec("ipykernel") is None,
        reason="Jupyter's nbclient and ipykernel are not installed: pip install nbclient ipykernel",
    ),
]


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(folder / "notebook.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    assert (folder / "notebook" / "report.html").exists()
    said = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("parameters, step 20" in text for text in said)
