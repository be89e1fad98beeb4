"""A task of one's own as a service: its `predict`, asked by many at once.

While a batch is computed, others gather and are the next one. What a task takes and gives is read from the annotations
of `predict`, and checked: an answer is what the task says it gives, in JSON. An error concerns the call whose inputs it
was: a batch that fails is asked again, call by call. The log tells where it happened, never with which inputs. A
`predict` that never returns keeps nobody but its own callers waiting.
"""

import asyncio
import json
import logging
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from cuadrilla.errors import TaskError
from cuadrilla.model.task import Predicting
from cuadrilla.serve.edge import Refusal, timed_out
from cuadrilla.serve.faults import Rarely
from cuadrilla.train.trained import Trained

MOST_BATCH, MOST_WAITING = 256, 4096
"""Inputs."""
CLOSE_SECONDS = 0.3
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
        self._rarely = Rarely()
        self._waiting: list[_Question] = []
        self._worker: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="predictor", daemon=True)
        self._thread.start()

    async def ask(self, inputs: list[Any], *, seconds: float) -> bytes:
        """The answer as JSON. Raises Refusal."""
        try:
            checked = self._inputs.validate_python(inputs)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, ("inputs", *first["loc"])))
            raise Refusal(422, f"{place}: {first['msg']}", param=place) from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            if times := self._rarely.times(what := _place(error)):
                log.error("a check of the task's own has failed, %s times: %s", times, what)
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

    def stop(self) -> None:
        """After what it does now."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self, *, seconds: float) -> None:
        """A `predict` that does not return is left alone: it ends with the process."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._loop.close()

    async def _work(self) -> None:
        while self._waiting:
            batch: list[_Question] = []
            while self._waiting and sum(len(question.inputs) for question in batch) < MOST_BATCH:
                batch.append(self._waiting.pop(0))
            asked = [question for question in batch if not question.outputs.done()]  # the others have left
            if not await self._answer(asked) and len(asked) > 1:
                for question in asked:
                    await self._answer([question])

    async def _answer(self, asked: Sequence[_Question]) -> bool:
        """Whether they have their outputs; a call that fails alone gets a refusal."""
        inputs = [one for question in asked for one in question.inputs]
        work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._predict(inputs), self._loop))
        found: Sequence[str] | BaseException = (await asyncio.gather(work, return_exceptions=True))[0]
        if not isinstance(found, BaseException):
            outputs = iter(found)
            for question in asked:
                its_own = [next(outputs) for _ in question.inputs]
                if not question.outputs.done():
                    question.outputs.set_result(its_own)
            return True
        if times := self._rarely.times(what := _place(found)):
            log.error("the task's predict has failed, %s times: %s", times, what)
        if len(asked) == 1 and not asked[0].outputs.done():
            told = f"the task's predict has failed on these inputs ({type(found).__name__}); the service's log says how"
            asked[0].outputs.set_exception(Refusal(422, told, param="inputs"))
        return False

    async def _predict(self, inputs: list[Any]) -> Sequence[str]:
        """In the thread. Raises whatever the task raises, and ValueError for what JSON cannot hold: NaN among it."""
        if not inputs:
            return []
        model, device = self._trained.model, self._trained.device
        try:
            with torch.inference_mode(), self._trained.precision.around(model, device):
                given = self._outputs.validate_python(list(self._task.predict(model, inputs)))
        except SystemExit as error:
            raise TaskError("predict has called sys.exit", hint="raise an error") from error
        outputs = list(self._outputs.dump_python(given, mode="json"))
        if len(outputs) != len(inputs):
            raise TaskError(
                "predict gave {outputs} outputs for {inputs} inputs",
                outputs=len(outputs),
                inputs=len(inputs),
                hint="return one for each",
            )
        return [json.dumps(output, allow_nan=False, ensure_ascii=False) for output in outputs]


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
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()


@dataclass(frozen=True)
class Predictors:
    """By name; the first one is meant where none is named."""

    by_name: Mapping[str, Predictor]

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

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

    def close(self) -> None:
        """All together within `CLOSE_SECONDS`."""
        until = time.monotonic() + CLOSE_SECONDS
        for predictor in self.by_name.values():
            predictor.stop()
        for predictor in self.by_name.values():
            predictor.close(seconds=max(until - time.monotonic(), 0.0))
