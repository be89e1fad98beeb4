"""The code of docs/python.md runs as a script."""

import re
import sys
from pathlib import Path

import pytest

from tests.commands import cuadrilla, run_program

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_page_runs_and_the_commands_go_on(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    script = tmp_path / "script.py"
    script.write_text("\n".join(blocks), encoding="utf-8")  # no `if __name__ == "__main__"`: none is needed
    said = run_program(sys.executable, script, cwd=tmp_path, seconds=500).stdout.splitlines()
    assert [line.split()[0] for line in said[:20]] == [str(step) for step in range(1, 21)]
    assert "Había una vez" not in said[20]  # what was written, not the prompt
    assert any(re.fullmatch(r"\d\.\d\d -> \d\.\d\d in 30 steps, \d\.\d\d held out", line) for line in said)
    assert any("unknown key train.batch_size - did you mean batch_sequences" in line for line in said)
    cuadrilla("train", "first", "--set", "train.steps=30", cwd=tmp_path, code=0)  # it is complete: nothing to do
