"""A worker with another version of cuadrilla, or with other code of the model, does not become a member of a crew."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import cuadrilla
from cuadrilla.link.base import Hello, Link, ToCoordinator
from cuadrilla.model.task import load_task
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.train.fingerprint import code_fingerprint
from tests.commands import TASK
from tests.faults import FaultyLink
from tests.runs import execute, workers
from tests.tasks import FrozenBeginning, RaggedRegression

STRICT = "sync.strict=true"
CREW = (workers([1.0, 1.0]),)


class OtherLink(FaultyLink):
    """A worker's link that changes the worker's description of itself; None removes a value."""

    def __init__(self, link: Link, facts: Mapping[str, str | None]) -> None:
        super().__init__("", link, [], [])
        self._facts = facts

    def call(self, message: ToCoordinator) -> None:
        if isinstance(message, Hello):
            told = {**message.environment, **self._facts}
            message = replace(message, environment={key: value for key, value in told.items() if value is not None})
        super().call(message)


def test_another_program_is_refused_with_both_versions(tmp_path: Path) -> None:
    def wrap(name: str, link: Link) -> Link:
        told = {"cuadrilla": None, "frozen parameters": "another"}
        return OtherLink(link, told) if name == "worker-1" else link

    outcome = execute(tmp_path, FrozenBeginning(), STRICT, *CREW, wrap_link=wrap)
    assert outcome.complete
    [evicted] = [row for row in read_jsonl(RunDir(tmp_path).events) if row["event"] == "evicted"]
    assert evicted["worker"] == "worker-1"
    assert f"cuadrilla – ≠ {cuadrilla.__version__}" in evicted["reason"]
    assert "frozen parameters another ≠ " in evicted["reason"]


def test_another_torch_is_refused_in_strict_mode_only(tmp_path: Path) -> None:
    """In strict mode a worker that differs from the first one is refused, so one of these two is sent away."""

    def wrap(name: str, link: Link) -> Link:
        return OtherLink(link, {"torch": "1.0"}) if name == "worker-2" else link

    for mode, number in (((), 0), ((STRICT,), 1)):
        folder = tmp_path / str(number)
        assert execute(folder, RaggedRegression(), *mode, *CREW, wrap_link=wrap).complete
        evicted = [row["reason"] for row in read_jsonl(RunDir(folder).events) if row["event"] == "evicted"]
        assert len(evicted) == number
        assert all("torch " in reason and " ≠ " in reason and "1.0" in reason for reason in evicted)


def test_the_hash_is_one_of_the_tasks_code(tmp_path: Path) -> None:
    codes = [TASK, TASK.replace("\n", "\r\n"), TASK.replace("GELU", "ReLU")]
    hashes = []
    for index, code in enumerate(codes):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "task.py").write_bytes(code.encode())
        task = load_task("task.py:task", folder=tmp_path / str(index))
        hashes.append(code_fingerprint(task, task.model())["model code"])
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]
