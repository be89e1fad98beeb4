"""The reason of a failed run is in events.jsonl once, and all programs that report the failure give the same reason."""

import json
import sys
from pathlib import Path

import pytest

from cuadrilla.monitor.run import RunReader
from cuadrilla.printable import one_line
from cuadrilla.rundir import RunDir
from tests.commands import TASK, events, make_run, train
from tests.inside import cuadrilla

WRITES = "import json, sys; open(sys.argv[1], 'a').write(json.load(sys.stdin)['event'] + '\\n')"
LONG = "x" * 5000


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "casa", steps=150)


def breaks_at(run: RunDir, count: int, error: str) -> None:
    """The task's own code fails from its `count`th pass on."""
    loss = "    def loss(self, model, batch):\n        Sine.count += 1\n"
    loss += f"        if Sine.count >= {count}: raise {error}\n"
    rest = "        return (model(batch['x']) - batch['y']).square().sum(), len(batch['x'])\n"
    before, _, after = TASK.partition("    def loss(self, model, batch):")
    (run.path / "task.py").write_text(before + "    count = 0\n" + loss + rest + after.partition("\n")[2])


def told(run: RunDir) -> list[str]:
    """The events that `[alarm]` has reported."""
    file = run.path / "told"
    return file.read_text().splitlines() if file.exists() else []


def alarms(run: RunDir) -> tuple[str, str]:
    command = [sys.executable, "-c", WRITES, str(run.path / "told")]
    return "--set", f"alarm.command={json.dumps(command)}"


def said_everywhere(run: RunDir) -> str:
    """The reason, which must be the same for all readers; and no worker is at work."""
    (failed,) = events(run, "failed")
    assert set(failed) == {"time", "event", "reason"}
    assert not events(run, "finished")
    watched = RunReader(run)
    crew = watched.data(now=failed["time"] + 5)
    page = watched.page()
    assert (crew["state"], page["head"]["state"]) == ("failed", "failed")
    assert crew["reason"] == page["head"]["reason"] == page["events"][-1]["details"]["reason"]
    assert one_line(crew["reason"]) in cuadrilla("monitor", run.path, "--once").stdout
    assert not any(machine["here"] for machine in crew["machines"])
    assert json.loads(run.status.read_text())["state"] == "failed"
    assert (told(run)[-1], told(run).count("failed")) == ("failed", 1)  # before it perhaps that a worker has left
    return one_line(crew["reason"])


@pytest.mark.parametrize("practice", ["", "--practice=1.0,0.5"])
def test_an_error_of_a_step(run: RunDir, practice: str) -> None:
    breaks_at(run, 20, "ValueError('broken\\nhere')")
    words = (*filter(None, [practice]), *alarms(run))
    assert train(run, *words).returncode == 2
    assert said_everywhere(run).endswith("ValueError: broken\\nhere")
    if not practice:
        (run.path / "task.py").write_text(TASK)
        train(run, *words, code=0)
        assert RunReader(run).data(now=1.8e9)["reason"] == ""


def test_a_task_that_fails_at_once_leaves_nothing_to_go_on_from(run: RunDir) -> None:
    (run.path / "task.py").write_text(TASK.replace("nn.Linear(8, 64)", "nn.Linear(16, 64)"))
    assert train(run).returncode == 2
    assert not run.checkpoints.exists()
    (run.path / "task.py").write_text(TASK)
    done = train(run)
    assert (done.returncode, "must return a sum" in done.stderr) == (0, False)


def test_a_loss_that_is_a_mean_is_named(run: RunDir) -> None:
    (run.path / "task.py").write_text(TASK.replace(".sum(), len", ".mean(), len"))
    done = train(run, "--set", "train.steps=1")
    assert "`loss` must return a sum: two examples have" in done.stderr


def test_before_anybody_coordinates(run: RunDir) -> None:
    assert train(run).returncode == 0
    before = run.status.read_text()
    (run.path / "task.py").write_text(f"raise OSError('{LONG}')")
    assert train(run, "--set", "train.steps=160", "--allow-changes", *alarms(run)).returncode != 0
    (failed,) = events(run, "failed")
    assert len(failed["reason"]) <= 500
    assert json.loads(run.status.read_text()) == {**json.loads(before), "state": "failed"}
    assert told(run) == ["failed"]


def test_what_was_typed_wrong_is_no_failure(run: RunDir) -> None:
    assert train(run).returncode == 0
    before = run.status.read_text()
    train(run, "--set", "optim.lr=0.5", "--set", "train.steps=160", *alarms(run), code=2)
    assert (events(run, "failed"), told(run), run.status.read_text()) == ([], [], before)
