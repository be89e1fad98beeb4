"""Scripted faults for workers of this process: die, corrupt or be interrupted at a step and a phase."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

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
PHASES: tuple[Phase, ...] = ("hello", "version", "lease", "pass", "upload", "contribute", "contributed")


class Died(Exception):
    """What a scripted death raises in the worker's thread."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """`worker` suffers `action` when it reaches `phase` while computing from version `at` (None: from any)."""

    worker: str
    at: int | None
    phase: Phase
    action: Callable[[], None] | Literal["die", "nan", "inf", "flip"] = "die"
    repeat: bool = False


class FaultyLink:
    """Wraps a worker's link and plays its scripts."""

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
        if action in ("nan", "inf", "flip"):
            tensors = dict(tensors)
            name = next(iter(tensors))
            tensors[name] = tensors[name].clone()
            if action == "flip":  # the highest bit of a float's exponent, or of a fixed-point number's value
                integers = (
                    tensors[name].view(-1).view(torch.int32 if tensors[name].element_size() == 4 else torch.int64)
                )
                integers[0] ^= 1 << (8 * integers.element_size() - 2)
            else:
                tensors[name].view(-1)[0] = float(action)
        return tensors

    def download(self, ref: TensorRef) -> Tensors:
        return self._link.download(ref)

    def close(self) -> None:
        self._link.close()

    def _reach(self, phase: Phase) -> object:
        for script in self._scripts:
            now = script.phase == phase and script.at in (None, self._version)
            if now and (script.repeat or script not in self._played):
                self._played.append(script)
                if script.action == "die":
                    raise Died(f"scripted at {phase} of version {self._version}")
                if callable(script.action):
                    script.action()
                return script.action
        return None


def play(*scripts: Script) -> tuple[Callable[[str, Link], Link], list[Script]]:
    """A `wrap_link` that plays the scripts, and the list of those that were played."""
    played: list[Script] = []
    return lambda worker, link: FaultyLink(worker, link, list(scripts), played), played
