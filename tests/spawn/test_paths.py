"""Commands with odd names of folders and files: they work, or one line says why not."""

import json
import subprocess
from pathlib import Path

import pytest

from cuadrilla.data import cuentos
from cuadrilla.rundir import RunDir, read_jsonl
from tests.commands import COMMAND, RUN, TASK
from tests.inside import cuadrilla

ODD = "-empieza " + "ĉ" * 60 + "🦙 $HOME;ls C:\\Users comillas ' \" `"


@pytest.mark.parametrize("name", ["mis textos ñandú", pytest.param(ODD, marks=pytest.mark.thorough)])
def test_text_data_and_run_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    (home / f"{name}.txt").write_text("\n\n".join(cuentos.stories(60)), encoding="utf-8")
    cuadrilla("data", "prepare", f"./{name}.txt", "--out", f"./{name}-data", "--vocab", "400", cwd=home, code=0)
    (home / "run.toml").write_text(
        f"[data]\nfolder = '''{name}-data'''\n[model]\npreset = 'micro'\ncontext = 32\n"
        "[train]\nsteps = 2\nbatch_sequences = 2\nunit_sequences = 1\n[sample]\ntokens = 2\n",
        encoding="utf-8",
    )
    cuadrilla("train", f"./{name}", cwd=tmp_path, code=0)
    assert [row["version"] for row in read_jsonl(RunDir(home).metrics)] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {name}  # nothing was written beside it


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_what_is_printed(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "train", "--show-config"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=150,
            check=False,
        )  # fmt: skip
    assert done.returncode == 8
    assert "cannot write what this command prints" in done.stderr


def test_names_that_are_too_long_or_lead_in_circles(tmp_path: Path) -> None:
    long = "a" * 300
    (tmp_path / "circle").symlink_to("circle")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "again").symlink_to(texts, target_is_directory=True)
    (texts / "one.txt").write_text("\n\n".join(cuentos.stories(60)), encoding="utf-8")
    for arguments, code in (
        (("new", long), 2),
        (("data", "prepare", long, "--out", "data"), 4),
        (("data", "prepare", "texts", "--out", long), 2),
        (("data", "prepare", "circle", "--out", "data"), 4),
        (("train", "circle"), 2),
        (("train", long), 2),
    ):
        done = cuadrilla(*arguments, cwd=tmp_path)
        assert done.returncode == code, (arguments, done.stderr)
        assert "hint:" in done.stderr
        assert "Traceback" not in done.stderr
    done = cuadrilla("data", "prepare", "texts", "--out", "data", "--vocab", "400", cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # each text once, however many ways lead to it
    sources = json.loads((tmp_path / "data" / "manifest.json").read_text())["sources"]
    assert [source["name"].rpartition("/")[2] for source in sources] == ["one.txt"]


def test_a_task_outside_the_run_folder_is_found_but_nothing_is_written_there(tmp_path: Path) -> None:
    """`..` in a path is followed as usual, and outputs stay in the run's folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "code" / "task.py").write_text(TASK)
    (tmp_path / "run" / "run.toml").write_text(RUN.format(steps=3).replace("task.py:task", "../code/task.py:task"))
    cuadrilla("train", "run", cwd=tmp_path, code=0)
    assert {path.name for path in (tmp_path / "code").iterdir()} <= {"task.py", "__pycache__"}
