"""Where calls of a function are done on this machine: each in a process of its own, which ends with this one.

A process that is killed is no failure of its trial, unless that happens again and again: somebody else does it. One
that ends by itself without a result is.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cuadrilla.engines.calls import call_command, call_limits
from cuadrilla.engines.children import Children
from cuadrilla.jobs.places import MAX_DEATHS, Left
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, finite_json, make_private, storage_errors
from cuadrilla.tune.search import Job

TALK = "talk.txt"
"""In the logs of a trial: what its function printed."""
SILENT = Message("its process ended without a result")


class CallPlaces:
    """Used by one thread. `threads`: of each."""

    def __init__(self, number: int, *, threads: int) -> None:
        self.places: Sequence[str] = [f"place-{at + 1}" for at in range(number)]
        self._environment = call_limits(threads)
        self._children = Children(died=lambda name, reason: self._reasons.__setitem__(name, reason))
        self._reasons: dict[str, Message] = {}
        self._at: dict[str, tuple[Job, float]] = {}
        self._deaths: Counter[tuple[int, int]] = Counter()

    @property
    def free(self) -> list[str]:
        return [name for name in self.places if name not in self._at]

    @property
    def busy(self) -> dict[str, Job]:
        return {name: job for name, (job, _) in self._at.items()}

    def start(self, job: Job, run: RunDir, *, name: str) -> None:
        """Raises ResourceError."""
        make_private(run.logs)
        with storage_errors(run.logs), open(run.logs / TALK, "ab") as talk:
            self._children.start(name, call_command(run.path), environment=self._environment, stderr=talk)
        self._at[name] = job, time.monotonic()

    def look(self) -> list[Left[Job]]:
        """Who has ended since."""
        left: list[Left[Job]] = []
        for name, code in self._children.look().items():
            job, began = self._at.pop(name)
            reason = self._reasons.pop(name, SILENT)
            if code < 0:
                self._deaths[job.key] += 1
                reason = reason if self._deaths[job.key] >= MAX_DEATHS else Message("")
            answer = parse_answer(self._children.last_words[name]) if code == 0 else None
            left.append(left_with(answer, job=job, place=name, seconds=time.monotonic() - began, reason=reason))
        return left

    def stop(self) -> None:
        """A call cannot be saved: end them all. `look` tells of them."""
        for process in self._children.alive.values():
            process.terminate()

    def close(self) -> None:
        """End whoever is still there."""
        self._children.end(finish_seconds=0.0)


def parse_answer(text: str) -> Mapping[str, Any] | None:
    """What a call's process said, if it is a result."""
    with suppress(ValueError, RecursionError):
        said = finite_json(text)
        if isinstance(said, dict) and said.get("complete") is True and _are_figures(said.get("figures")):
            return said
    return None


def _are_figures(figures: object) -> bool:
    return isinstance(figures, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in figures.values()
    )


def left_with(answer: Mapping[str, Any] | None, *, job: Job, place: str, seconds: float, reason: str) -> Left[Job]:
    """Of a job with a result, or with the reason why there is none (empty: somebody has to do it again)."""
    if answer is None:
        return Left(job=job, place=place, complete=False, seconds=seconds, reason=reason)
    figures = {"seconds": answer["seconds"], **answer["figures"]}
    return Left(job=job, place=place, complete=True, seconds=seconds, figures=figures)
