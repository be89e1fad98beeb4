"""A task of one's own as a service: its `predict`, asked by many at once.

While a batch is computed, others gather and are the next one. What a task takes and gives is read from the annotations
of `predict`, and checked: an answer is what the task says it gives, in JSON. An error concerns the call whose inputs it
was: a batch that fails is asked again, call by call. The log tells where it happened, never with which inputs. A
`predict` that never returns keeps nobody but its own callers waiting.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from cuadrilla.errors import TaskError
from cuadrilla.model.task import Predicting
from cuadrilla.serve.edge import Refusal, timed_out
from cuadrilla.serve.listen import where
from cuadrilla.train.trained import Trained

MOST_BATCH, MOST_WAITING = 256, 4096
"""Inputs."""
ANNOTATE = "annotate it: def predict(self, model: nn.Module, inputs: list[In]) -> list[Out]"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Question:
    inputs: list[Any]
    outputs: "asyncio.Future[Sequence[str]]"
    """Each in JSON."""


class Predictor:
    """A run's task with its model. Raises TaskError for a task that does not say what it takes and gives."""

    def __init__(self, name: str, trained: Trained) -> None:
        task = trained.task
        if not isinstance(task, Predicting):
            raise TaskError(
                "{task} has no predict(model, inputs)",
                task=type(task).__name__,
                hint="add one, as examples/mnist_cnn.py has it; docs/serving.md explains it",
            )
        self.name, self._task, self._trained = name, task, trained
        self._inputs, self._outputs = _adapters(task)
        self.schema: Mapping[str, Any] = {
            "model": name,
            "inputs": self._inputs.json_schema(),
            "outputs": self._outputs.json_schema(mode="serialization"),
        }
        self._waiting: list[_Question] = []
        self._asked: Sequence[_Question] = []
        """The batch at hand."""
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "predictor")

    async def ask(self, inputs: list[Any], *, seconds: float) -> bytes:
        """The answer as JSON. Raises Refusal."""
        try:
            checked = self._inputs.validate_python(inputs)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, ("inputs", *first["loc"])))
            raise Refusal(422, f"{place}: {first['msg']}", param=place) from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            log.error("a check of the task's own has failed: %s", _place(error))
            told = f"inputs: the task's own check has failed on them ({type(error).__name__})"
            raise Refusal(422, told, param="inputs") from None
        if sum(len(question.inputs) for question in self._waiting) + len(checked) > MOST_WAITING:
            raise Refusal(429, "too many inputs wait already", code="overloaded", wait_seconds=1)
        question = _Question(inputs=checked, outputs=asyncio.get_running_loop().create_future())
        self._waiting.append(question)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        try:
            outputs = await asyncio.wait_for(question.outputs, seconds)
        except TimeoutError:
            raise timed_out(seconds) from None
        return f'{{"model":{json.dumps(self.name)},"outputs":[{",".join(outputs)}]}}'.encode()

    def end(self) -> None:
        """Whoever still waits is told so. A `predict` that does not return is left alone: it ends with the process."""
        for question in (*self._waiting, *self._asked):
            if not question.outputs.done():
                question.outputs.set_exception(Refusal(503, "the service is ending", code="draining", wait_seconds=1))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        while self._waiting:
            batch: list[_Question] = []
            while self._waiting and sum(len(question.inputs) for question in batch) < MOST_BATCH:
                batch.append(self._waiting.pop(0))
            self._asked = [question for question in batch if not question.outputs.done()]  # the others have left
            if not await self._answer(self._asked) and len(self._asked) > 1:
                for question in self._asked:
                    await self._answer([question])

    async def _answer(self, asked: Sequence[_Question]) -> bool:
        """Whether they have their outputs; a call that fails alone gets a refusal."""
        inputs = [one for question in asked for one in question.inputs]
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._predict, inputs)
        found: Sequence[str] | BaseException = (await asyncio.gather(work, return_exceptions=True))[0]
        if not isinstance(found, BaseException):
            outputs = iter(found)
            for question in asked:
                its_own = [next(outputs) for _ in question.inputs]
                if not question.outputs.done():
                    question.outputs.set_result(its_own)
            return True
        log.error("the task's predict has failed: %s", _place(found))
        if len(asked) == 1 and not asked[0].outputs.done():
            told = f"the task's predict has failed on these inputs ({type(found).__name__}); the service's log says how"
            asked[0].outputs.set_exception(Refusal(422, told, param="inputs"))
        return False

    def _predict(self, inputs: list[Any]) -> Sequence[str]:
        """In the thread. Raises whatever the task raises, and ValueError for what JSON cannot hold: NaN among it."""
        if not inputs:
            return []
        model, device = self._trained.model, self._trained.device
        try:
            with torch.inference_mode(), self._trained.precision.around(model, device):
                given = self._outputs.validate_python(list(self._task.predict(model, inputs)))
        except (SystemExit, StopIteration) as error:  # which would end the thread, or be lost on the way
            raise TaskError("predict has raised {kind}", kind=type(error).__name__, hint="raise an error") from error
        outputs = list(self._outputs.dump_python(given, mode="json"))
        if len(outputs) != len(inputs):
            raise TaskError(
                "predict gave {outputs} outputs for {inputs} inputs",
                outputs=len(outputs),
                inputs=len(inputs),
                hint="return one for each",
            )
        return [json.dumps(output, allow_nan=False) for output in outputs]


def _adapters(task: Predicting) -> tuple[TypeAdapter[list[Any]], TypeAdapter[Sequence[Any]]]:
    """Of what it takes and gives. Raises TaskError where it does not say, or JSON cannot hold it."""
    try:
        hints = get_type_hints(task.predict, include_extras=True)
        if not {"inputs", "return"} <= hints.keys():
            raise TaskError(
                "{task}.predict does not say what it takes and gives", task=type(task).__name__, hint=ANNOTATE
            )
        inputs: TypeAdapter[list[Any]] = TypeAdapter(hints["inputs"])
        outputs: TypeAdapter[Sequence[Any]] = TypeAdapter(hints["return"])
        inputs.json_schema()
        outputs.json_schema(mode="serialization")
    except (NameError, TypeError, PydanticUserError) as error:
        raise TaskError(
            "{task}.predict takes or gives what JSON cannot hold: {problem}",
            task=type(task).__name__,
            problem=str(error).partition("\n")[0],
            hint=ANNOTATE,
        ) from error
    return inputs, outputs


def _place(error: BaseException) -> str:
    """Where it was raised: what an error says may hold what a caller has sent."""
    if isinstance(error, TaskError):
        return str(error)
    if isinstance(error, ValidationError):  # of what it gave
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, ('outputs', *first['loc'])))}: {first['msg']}"
    return where(error)


@dataclass(frozen=True)
class Predictors:
    """By name; the first one is meant where none is named."""

    by_name: Mapping[str, Predictor]

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [predictor.schema for predictor in self.by_name.values()]

    def find(self, name: str | None) -> Predictor:
        """Raises Refusal for one that is not here."""
        if not self.by_name:
            raise Refusal(404, "this service has no task to predict with: ask /v1/completions", code="model_not_found")
        if name is None:
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            told = f"there is no such model; here: {', '.join(self.by_name)}"
            raise Refusal(404, told, param="model", code="model_not_found")
        return self.by_name[name]

    def end(self) -> None:
        for predictor in self.by_name.values():
            predictor.end()
