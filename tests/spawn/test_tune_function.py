"""A search over a function: real processes, what goes wrong in them, a search that is killed, and the examples."""

import importlib.util
import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.rundir import read_jsonl
from tests.commands import COMMAND, wait_for
from tests.inside import cuadrilla

EXAMPLES = Path(__file__).parents[2] / "examples" / "trees"
BOWL = """
def score(*, x: float, y: float = 0.0, kind: str, budget: float, seed: int) -> dict:
    print("looking at", x)
    return {"score": (x - 1) ** 2 + y ** 2 + (kind == "b") / budget + seed, "spent": budget}
"""
SPACE = """
[tune.space]
x = {low = -2.0, high = 2.0}
kind = {choices = ["a", "b"]}
y = {low = 0.1, high = 1.0, log = true, when = {kind = "b"}}
"""
WAITS = """
import os, threading
from pathlib import Path

HERE = Path(%r)

def wait_at(number):
    (HERE / "pid").write_text(str(os.getpid())) if not (HERE / "go").exists() else None
    while not (HERE / "go").exists():
        threading.Event().wait(0.02)
"""
"""A function that calls `wait_at` goes on when there is a file `go`."""


def write(folder: Path, code: str, *, space: str = SPACE, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "f.py").write_text(code)
    lines = [f"{key} = {json.dumps(value)}" for key, value in ({"sampler": "random"} | settings).items()]
    head = '[run]\nseed = 5\n[tune]\nfunction = "f.py:score"\n'
    (folder / "run.toml").write_text(head + "\n".join(lines) + space)
    return folder


def rows(folder: Path, event: str = "ended") -> list[dict]:
    found = [row for row in read_jsonl(folder / "tune" / "trials.jsonl") if row["event"] == event]
    return sorted(found, key=lambda row: (row["trial"], row["rung"]))


def decided(folder: Path) -> list[tuple]:
    """What a search has tried and found, without times and places."""
    values = {(row["trial"], row["rung"]): row["values"] for row in rows(folder, "begun")}
    return [
        (row["trial"], row["rung"], row["score"], values[row["trial"], row["rung"]], row["reason"])
        for row in rows(folder)
    ]


def best(folder: Path) -> dict:
    return json.loads((folder / "tune" / "best.json").read_text())


def start(folder: Path, *options: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, "tune", *map(str, (folder, *options))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def pid_in(file: Path) -> int:
    """Of a process that waits, once it has said so."""
    wait_for(lambda: file.exists() and bool(file.read_text()))
    return int(file.read_text())


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_search_with_rungs_finds_the_best_and_keeps_what_was_printed(tmp_path: Path) -> None:
    folder = write(tmp_path / "bowl", BOWL, trials=4, rungs=2, factor=2)
    done = cuadrilla("--json", "tune", folder, "--together", 2)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    found = best(folder)
    assert (table[0]["run"], table[0]["score"]) == (found["trial"], found["score"])
    assert {key: value for key, value in table[0].items() if key in found["values"]} == found["values"]
    assert [row["rung"] for row in rows(folder)].count(1) == 2
    assert {row["rung"]: row["figures"]["spent"] for row in rows(folder)} == {0: 0.5, 1: 1.0}
    assert "looking at" in (folder / "tune" / found["trial"] / "logs" / "talk.txt").read_text()
    again = cuadrilla("--json", "tune", folder)
    assert json.loads(again.stdout) == table
    (folder / "f.py").write_text(BOWL + "\n")
    changed = cuadrilla("tune", folder)
    assert changed.returncode == 2
    assert "tune.function.sha256" in changed.stderr


FAULTS = """
import os, signal, sys

def score(how):
    print("to be", how)
    os.write(1, b"written past Python\\n")
    match how:
        case "good": return 1.0
        case "raise": return [][how]
        case "exit": sys.exit(3)
        case "leave": os._exit(0)
        case "nan": return float("nan")
        case "text": return "0.9"
        case "other": return {"loss": 1.0}
        case "long": raise RuntimeError("x" * 1_000_000)
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
"""
WHY = {
    "good": "",
    "raise": "f.py:9: TypeError: list indices",
    "exit": "score ended its process with 3",
    "leave": "its process ended without a result",
    "nan": "score returned nan as score",
    "text": "score returned a str as score",
    "other": "the function gives no score; there are seconds, loss",
    "long": "f.py:15: RuntimeError: xxx",
    "killed": "signal 9",
}


@pytest.mark.thorough
def test_a_call_that_goes_wrong_is_a_failure_of_its_trial(tmp_path: Path) -> None:
    space = f"\n[tune.space]\nhow = {{choices = {json.dumps(list(WHY))}}}\n"
    folder = write(tmp_path / "faults", FAULTS, space=space, sampler="grid")
    done = cuadrilla("tune", folder, "--together", 2)
    assert done.returncode == 0, done.stderr
    assert [row["score"] for row in rows(folder)] == [1.0, *[None] * (len(WHY) - 1)]
    for row, (how, why) in zip(rows(folder), WHY.items(), strict=True):
        assert row["reason"].startswith(why), (how, row["reason"])
        assert len(row["reason"]) < 700
        talk = (folder / "tune" / f"t{row['trial']:04d}-r0" / "logs" / "talk.txt").read_text()
        assert talk.startswith("written past Python\n") or talk.startswith(f"to be {how}\n")
        assert ("Traceback" in talk) == (how in ("raise", "exit", "nan", "text", "long"))


def test_ctrl_c_ends_a_call_that_hangs_and_the_next_start_makes_it_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "hangs", WAITS % str(tmp_path) + BOWL.replace("    print", "    wait_at(x)\n    print"),
                   trials=2)  # fmt: skip
    search = start(folder)
    pid = pid_in(tmp_path / "pid")
    search.send_signal(signal.SIGINT)
    _, said = search.communicate(timeout=150)
    assert search.returncode == INTERRUPTED_EXIT_CODE, said
    assert "the same command goes on" in said
    assert "Traceback" not in said
    wait_for(lambda: is_gone(pid))
    assert rows(folder) == []
    (tmp_path / "go").touch()
    assert cuadrilla("tune", folder).returncode == 0
    assert len(rows(folder)) == 2


def test_a_search_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    code = WAITS % str(tmp_path) + BOWL.replace("    print", "    (budget == 1) and wait_at(x)\n    print")
    whole, broken = (write(tmp_path / name, code, trials=3, rungs=2, factor=2) for name in ("whole", "broken"))
    search = start(broken)
    pid = pid_in(tmp_path / "pid")
    search.kill()
    search.communicate(timeout=150)
    wait_for(lambda: is_gone(pid))
    (tmp_path / "go").touch()
    assert cuadrilla("tune", broken, "--together", 2).returncode == 0
    assert cuadrilla("tune", whole).returncode == 0
    assert decided(broken) == decided(whole)
    assert best(broken) == best(whole)
    assert len(rows(whole)) == 4


def test_there_is_nothing_to_train_and_trainings_do_not_go_through_dask(tmp_path: Path) -> None:
    folder = write(tmp_path / "bowl", BOWL)
    done = cuadrilla("train", folder)
    assert done.returncode == 2
    assert "there is nothing to train" in done.stderr
    assert f"cuadrilla tune {folder}" in done.stderr
    assert cuadrilla("config", "show", folder).returncode == 0
    for option in (("--insecure-scheduler",), ("--scheduler", "tcp://192.168.1.50:8786", "--together", 2)):
        assert cuadrilla("tune", folder, *option).returncode == 2
    (folder / "run.toml").write_text('[data]\nfolder = "data"\n[train]\nsteps = 1\n' + SPACE)
    done = cuadrilla("tune", folder, "--scheduler", "tcp://127.0.0.1:1")
    assert done.returncode == 2
    assert "trainings do not go through Dask" in done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_the_forest(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "forest", tmp_path / "forest")
    done = cuadrilla("tune", folder, "--set", "tune.trials=4")
    assert done.returncode == 0, done.stderr
    assert [row["rung"] for row in rows(folder)] == [0, 1, 0, 0, 0]
    assert best(folder)["score"] > 0.9  # 0.1 by chance


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.skipif(importlib.util.find_spec("xgboost") is None, reason="xgboost is not installed")
@pytest.mark.parametrize(("name", "most"), [("classes", 0.6), ("disease", 77.0)])
def test_boosting(tmp_path: Path, name: str, most: float) -> None:
    """`most`: what guessing gives."""
    folder = shutil.copytree(EXAMPLES / "boosted", tmp_path / "boosted")
    options = ("--set", "tune.trials=2", "--set", f'tune.function="boosted.py:{name}"')
    done = cuadrilla("tune", folder, *options)
    assert done.returncode == 0, done.stderr
    assert best(folder)["score"] < most
