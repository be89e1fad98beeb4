"""A run with a task of its own: its data travel to the machine that trains it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cuadrilla.crew.bundle import code_hash
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir
from tests.commands import RUN, TASK, is_what_one_worker_gives, wait_for
from tests.machines import Machine, invite

DIGITS = """
class Images(Data):
    def __init__(self, folder):
        self.x, self.y = np.load(folder / "images.npy"), np.load(folder / "digits.npy")

class Digits(Sine):
    def __init__(self, folder): self.folder = folder
    def data(self, split): return Images(self.folder / split)
    def data_hash(self): return str(sum(self.data(split).y.sum() for split in ("train", "val")))
"""


def digits_run(folder: Path) -> RunDir:
    """Of ten steps, with four small files in `data/`."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, number in (("train", 512), ("val", 64)):
        (folder / "data" / split).mkdir(parents=True)
        np.save(folder / "data" / split / "images.npy", random.standard_normal((number, 8)).astype(np.float32))
        np.save(folder / "data" / split / "digits.npy", random.integers(0, 10, (number, 1)).astype(np.float32))
    (folder / "task.py").write_text(TASK + DIGITS)
    named = RUN.format(steps=10).replace("task.py:task", 'task.py:Digits"\ndata = "data/')
    (folder / "run.toml").write_text(f"{named}[sync]\nstrict = true\n")
    return RunDir(folder)


@pytest.mark.thorough
def test_a_queued_run_takes_its_data_to_the_machine_that_trains_it(
    machine: Callable[[str], Machine], tmp_path: Path
) -> None:
    run, coordinator, ana = digits_run(tmp_path / "run"), machine("coordinator"), machine("ana")
    assert coordinator.run("queue", "add", str(run.path)).returncode == 0
    process = coordinator.start("queue", "work", "--listen", "127.0.0.1:0", "--not-here", "--until-empty")
    wait_for(lambda: Home(coordinator.home).open_file.exists(), process)
    Home(ana.home).trust(code_hash([run.path / "task.py"]))
    worker = ana.start("join", "--name", "ana", says=invite(coordinator))
    assert process.wait(timeout=150) == 0
    assert "fetching 4 files" in worker.communicate(timeout=150)[1]
    assert is_what_one_worker_gives(run)
