"""A user's task as a service: one thread runs its `predict`, call by call.

    def predict(self, model: nn.Module, inputs: list[In]) -> list[Out]

It returns one output for each input. The model is in evaluation mode, and no gradients are computed. The annotations
(pydantic classes, dataclasses, plain types) say what inputs and outputs are. Both are checked, and the outputs become
JSON. An error goes to the log, and fails only the call with these inputs.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from cuadrilla.errors import TaskError
from cuadrilla.serve.edge import Refusal
from cuadrilla.train.trained import Trained
from cuadrilla.user_file import UsersCode

log = logging.getLogger(__name__)


class Predictor:
    """A run's task with its model. Raises TaskError if `predict` is missing or not annotated."""

    def __init__(self, name: str, trained: Trained) -> None:
        about = {"task": type(trained.task).__name__}
        self.name, self._trained = name, trained
        self._task_predict: Any = getattr(trained.task, "predict", None)
        if self._task_predict is None:
            hint = "add one, as examples/mnist_cnn.py has it; docs/serve.md explains it"
            raise TaskError("{task} has no predict(model, inputs)", **about, hint=hint)
        try:
            hints = get_type_hints(self._task_predict, include_extras=True)
            self._inputs: TypeAdapter[list[Any]] = TypeAdapter(hints["inputs"])
            self._outputs: TypeAdapter[Sequence[Any]] = TypeAdapter(hints["return"])
            self.schema: Mapping[str, Any] = {
                "model": name,
                "inputs": self._inputs.json_schema(),
                "outputs": self._outputs.json_schema(mode="serialization"),
            }
        except (KeyError, NameError, TypeError, PydanticUserError) as error:
            raise TaskError(
                "{task}.predict needs annotations for its inputs and outputs that JSON can express: {problem}",
                **about,
                problem=str(error).partition("\n")[0],
                hint="annotate it: def predict(self, model: nn.Module, inputs: list[In]) -> list[Out]",
            ) from error
        self._thread = ThreadPoolExecutor(1, "predictor")

    async def ask(self, inputs: list[Any]) -> bytes:
        """Run `predict`. Returns the answer as JSON. Raises Refusal."""
        try:
            checked = self._inputs.validate_python(inputs)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, ("inputs", *first["loc"])))
            raise Refusal(400, f"{place}: {first['msg']}", param=place) from None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._predict, checked)
        except TaskError as error:
            log.exception("the task's predict has failed")
            kind = type(error.__cause__ or error).__name__
            template = f"the task's predict has failed on these inputs ({kind}); the service's log says how"
            raise Refusal(400, template, param="inputs") from None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A block at whose end waiting calls are dropped. A `predict` that is running is not waited for."""
        try:
            yield
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _predict(self, inputs: list[Any]) -> bytes:
        """Runs in the thread. Raises TaskError."""
        model, device = self._trained.model, self._trained.device
        with UsersCode():
            with torch.inference_mode(), self._trained.precision.around(model, device):
                outputs = self._outputs.validate_python(list(self._task_predict(model, inputs)))
            if len(outputs) != len(inputs):
                raise ValueError(f"predict gave {len(outputs)} outputs for {len(inputs)} inputs")
            found = {"model": self.name, "outputs": self._outputs.dump_python(outputs, mode="json")}
            return json.dumps(found, allow_nan=False).encode()
        raise AssertionError
