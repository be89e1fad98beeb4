"""A user's task file that causes scripted faults from inside the processes that train it.

The script is the list in `script.json` beside this file; without it nothing happens. A fault occurs when a process
reaches a `phase` at a place `at`. In a worker the phases are "data", "forward" and "backward", and a place is the index
of an example; no example is used twice, so the index determines step and unit. In the coordinator the phases are
"evaluate" and "val data", and a place is a step. The first process that gets there makes the file `played/NAME` and
suffers the fault, once. The action "hold" is no fault: all processes wait there until another fault was played.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cuadrilla.model.task import TaskDefaults
from cuadrilla.rundir import RunDir, last_rows

SPACING = 10
"""Steps between two checkpoints, and between two evaluations; each evaluation has at most one fault."""
NUM_EXAMPLES, NUM_HELD_OUT = 8192, 32
SLOW_SECONDS, POLL_SECONDS = 0.3, 0.01
NAN = float("nan")
HOG_BYTES = 2**30


class Player:
    """Plays the script in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._played = folder / "played"
        script = folder / "script.json"
        self._faults = json.loads(script.read_text()) if script.exists() else []

    def reach(self, phase: str, places: list[int]) -> float:
        """Suffer the faults of this phase and these places. Returns a factor for the caller's number: NaN or 1."""
        factor = 1.0
        for fault in self._faults:
            if fault["phase"] == phase and fault["at"] in places:
                factor *= self._play(fault)
        return factor

    def _play(self, fault: Mapping[str, Any]) -> float:
        if fault["action"] == "hold":
            while not (self._played / fault["until"]).exists():
                time.sleep(POLL_SECONDS)
            return 1.0
        try:
            with open(self._played / fault["name"], "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return 1.0
        match fault["action"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(SLOW_SECONDS)
            case "nan":
                return NAN
            case "hog":  # writes to every page: more memory than its control group may have
                np.ones(HOG_BYTES, np.uint8)
            case "leak":  # more memory than there is: the allocator refuses
                torch.empty(2**60, dtype=torch.uint8)
        return 1.0


class Data:
    """Examples of the sine of a sum. `player` is told which one is fetched."""

    def __init__(self, seed: int, *, length: int, player: Player | None) -> None:
        random = np.random.default_rng(seed)
        self._x = random.standard_normal((length, 8)).astype(np.float32)
        self._y = np.sin(self._x.sum(1, keepdims=True))
        self._player = player

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._player is not None:
            self._player.reach("data", [index])
        return {"x": self._x[index], "y": self._y[index], "index": index}


class HeldOut(Data):
    def __init__(self, task: "Sine") -> None:
        super().__init__(1, length=NUM_HELD_OUT, player=None)
        self._task = task

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._task.reach_evaluation("val data")
        return super().__getitem__(index)


class Sine:
    defaults = TaskDefaults(length=1)

    def __init__(self, folder: Path) -> None:
        self._run = RunDir(folder)
        self._player = Player(folder)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        places = batch["index"].tolist()
        predicted = model(batch["x"])
        predicted.register_hook(lambda gradient: gradient * self._player.reach("backward", places))
        loss = (predicted - batch["y"]).square().sum()
        return loss * self._player.reach("forward", places), len(places)

    def data(self, split: str) -> Data:
        return Data(0, length=NUM_EXAMPLES, player=self._player) if split == "train" else HeldOut(self)

    def data_hash(self) -> str:
        return "sine"

    def evaluate(self, model: nn.Module, batches: Iterator[Mapping[str, Tensor]]) -> dict[str, float]:
        self.reach_evaluation("evaluate")
        total = sum(float((model(batch["x"]) - batch["y"]).square().sum()) for batch in batches)
        return {"loss": total / NUM_HELD_OUT}

    def reach_evaluation(self, phase: str) -> None:
        """The evaluated step has no row yet, so it is the next multiple of SPACING after the last row."""
        rows = last_rows(self._run.metrics)
        last = rows[-1]["version"] if rows else 0
        self._player.reach(phase, [last - last % SPACING + SPACING])


def task() -> Sine:
    return Sine(Path(__file__).parent)
