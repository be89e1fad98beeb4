"""A user's task that returns nonsense or fails: only the client that sent the request gets an error."""

import asyncio
import json
import sys

import pytest
from torch import nn

from cuadrilla.errors import TaskError
from cuadrilla.serve.edge import Refusal
from tests.serving import predictor


class Liar:
    def predict(self, model: nn.Module, inputs: list[str]) -> list[float]:
        found = []
        for one in inputs:
            if one == "raise":
                raise ValueError(one)
            if one == "exit":
                sys.exit(3)
            found += [] if one == "few" else [float("nan") if one == "nan" else float(len(one))]
        return found


@pytest.mark.parametrize("lie", ["raise", "few", "nan", "exit"])
def test_a_task_that_lies_or_fails(lie: str) -> None:
    asked: list[str | int] = ["abc", lie, "de", 5, lie, "f"]

    async def all_at_once() -> list[bytes | BaseException]:
        service = predictor(Liar())
        async with service.running():
            return await asyncio.gather(*(service.ask([one]) for one in asked), return_exceptions=True)

    found = asyncio.run(all_at_once())
    for one, answer in zip(asked, found, strict=True):
        if isinstance(answer, bytes):
            assert json.loads(answer)["outputs"] == [len(str(one))]
        else:
            assert isinstance(answer, Refusal)
            assert (answer.status_code, answer.param) == (400, "inputs.0" if one == 5 else "inputs")
    assert [isinstance(answer, bytes) for answer in found] == [True, False, True, False, False, True]


class Silent:
    def predict(self, model, inputs):
        return inputs


@pytest.mark.parametrize(("task", "says"), [(Silent(), "needs annotations"), (object(), "has no predict")])
def test_a_task_that_cannot_be_asked_says_what_is_missing(task: object, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        predictor(task)
    assert caught.value.hint
