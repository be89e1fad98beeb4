"""`cuadrilla serve` in its own process, on a free port of the loopback, and a client for it."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from cuadrilla.model.task import Task
from cuadrilla.runfile import resolve
from cuadrilla.serve.predictions import Predictor
from cuadrilla.train.checkpoint import Step
from cuadrilla.train.precision import choose_precision
from cuadrilla.train.trained import Trained
from tests.commands import begin, wait_for
from tests.loopback import ask
from tests.runs import RUN_FILE

CPU = torch.device("cpu")
URL = re.compile(r"serving +(https?://\S+)")


@dataclass
class Service:
    process: "subprocess.Popen[str]"
    url: str
    said: Path
    key: str

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON (or text) of an answer. A body is posted as JSON; the key is always sent."""
        status, answer, _ = ask(self.url + path, headers={"Authorization": f"Bearer {self.key}"}, body=body)
        return status, _value(answer)

    def figure(self, name: str, model: str) -> int:
        """A figure of /metrics; 0 if it is not listed yet."""
        lines = self.ask("/metrics")[1].splitlines()
        start = f'cuadrilla_{name}{{model="{model}"}} '
        return int(float(next((line.removeprefix(start) for line in lines if line.startswith(start)), "0")))

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)


@contextmanager
def serving(*arguments: object, key: str = "") -> Iterator[Service]:
    """Run `cuadrilla serve ARGUMENTS` until the end of the block. With a `key`, clients must send it."""
    with tempfile.TemporaryDirectory() as folder:
        said, key_file = Path(folder) / "said.txt", Path(folder) / "key.txt"
        key_file.write_text(key + "\n")
        arguments += ("--api-key-file", key_file) if key else ()
        with open(said, "w") as file:
            process = begin("serve", *arguments, "--port", "0", stdout=file, stderr=file)
        try:
            wait_for(lambda: URL.search(said.read_text()) is not None or process.poll() is not None)
            found = URL.search(said.read_text())
            assert found, said.read_text()
            yield Service(process, found[1], said, key)
        finally:
            process.terminate()
            process.wait(timeout=60)


def predictor(task: object) -> Predictor:
    """A predictor in this process for a task, of which it needs only some methods. The model returns its input."""
    config, precision = resolve(RUN_FILE).config, choose_precision("fp32", device=CPU)
    step, model = Step(version=0, newest=0), nn.Identity()
    trained = Trained(config=config, task=cast(Task, task), model=model, device=CPU, precision=precision, step=step)
    return Predictor(type(task).__name__.lower(), trained)


def _value(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
