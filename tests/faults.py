"""Scripted faults for workers in this process: they die at a step and phase, or send a wrong number."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from cuadrilla.link.base import (
    Contribution,
    Hello,
    Lease,
    Link,
    Progress,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)

Phase = Literal["hello", "version", "lease", "pass", "upload", "contribute", "contributed"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Died(Exception):
    """Raised in the worker's thread as its scripted death."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """When `worker` reaches `phase`, computing from version `at` (None: from any version), it suffers `action`."""

    worker: str
    at: int | None
    phase: Phase
    action: Literal["die", "nan", "inf", "flip"] = "die"


class FaultyLink:
    """Wraps a worker's link and causes its scripted faults."""

    def __init__(self, worker: str, link: Link, scripts: list[Script], played: list[Script]) -> None:
        self._link = link
        self._scripts = [script for script in scripts if script.worker == worker]
        self._played = played
        self._version = 0

    def call(self, message: ToCoordinator) -> None:
        match message:
            case Hello():
                self._reach("hello")
            case Progress():
                self._reach("pass")
            case Contribution():
                message = replace(message, tensors=self._upload(message.tensors))
                self._reach("contribute")
        self._link.call(message)
        if isinstance(message, Contribution):
            self._reach("contributed")

    def next_event(self) -> ToWorker:
        event = self._link.next_event()
        match event:
            case Version():
                self._version = event.version
                self._reach("version")
            case Lease():
                self._reach("lease")
        return event

    def interrupted(self) -> bool:
        return self._link.interrupted()

    def _upload(self, tensors: Tensors) -> Tensors:
        action = self._reach("upload")
        if not action:
            return tensors
        name, tensor = next(iter(tensors.items()))
        tensor = tensor.clone()
        if action == "flip":  # flip the highest bit of a float's exponent, or of a fixed-point number's value
            integers = tensor.view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int64)
            integers[0] ^= 1 << (8 * integers.element_size() - 2)
        else:
            tensor.view(-1)[0] = float(action)
        return {**tensors, name: tensor}

    def download(self, ref: TensorRef) -> Tensors:
        return self._link.download(ref)

    def _reach(self, phase: Phase) -> str:
        """Die if a script says so; else the action that an upload suffers now, or "" for none."""
        for script in self._scripts:
            if script.phase == phase and script.at in (None, self._version) and script not in self._played:
                self._played.append(script)
                if script.action == "die":
                    raise Died(f"scripted at {phase} of version {self._version}")
                return script.action
        return ""


def play(*scripts: Script) -> tuple[Callable[[str, Link], Link], list[Script]]:
    """A `wrap_link` that causes the scripted faults, and the list of scripts that have been played."""
    played: list[Script] = []
    return lambda worker, link: FaultyLink(worker, link, list(scripts), played), played
