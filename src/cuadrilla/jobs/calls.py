"""Calls of a function as jobs: each is a process of its own, which ends with this one; and how another machine is told
of one.

A process that is killed is no failure of its job, unless that happens again and again: somebody else does it. One that
ends by itself without a result is.

Invariants
* A machine calls what stands as a `def` in files that its owner has approved, with plain values, and with the packages
  of whoever asks: others might give other results.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic

from cuadrilla.engines.calls import MAX_TALK_BYTES, REQUEST, call_command, call_limits, packages_here
from cuadrilla.engines.children import Children
from cuadrilla.errors import LinkError
from cuadrilla.jobs.places import MAX_DEATHS, SILENT, J, Left, keep_short
from cuadrilla.link.base import Refused
from cuadrilla.link.jobs import parse_object
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, file_sha256, finite_json, make_private, open_private, storage_errors

TALK = "talk.txt"
"""In the logs of a job: what its function printed."""
MAX_CALL_CHARACTERS = 2**18


class CallPlaces(Generic[J]):
    """Used by one thread. `threads`: of each; `environment`: more variables of its processes."""

    def __init__(self, places: Sequence[str], *, threads: int, environment: Mapping[str, str] | None = None) -> None:
        self.places = places
        self._environment = {**call_limits(threads), **(environment or {})}
        self._children = Children(died=lambda name, reason: self._reasons.__setitem__(name, reason))
        self._reasons: dict[str, Message] = {}
        self._at: dict[str, tuple[J, RunDir, float]] = {}
        self._deaths: Counter[str] = Counter()

    @property
    def free(self) -> list[str]:
        return [name for name in self.places if name not in self._at]

    @property
    def busy(self) -> dict[str, J]:
        return {name: job for name, (job, _, _) in self._at.items()}

    def device(self, _place: str) -> str:
        """What a function computes with is its own affair."""
        return "cpu"

    def start(self, job: J, run: RunDir, *, name: str) -> None:
        """Raises ResourceError."""
        make_private(run.logs)
        with storage_errors(run.logs), open(run.logs / TALK, "ab") as talk:
            self._children.start(name, call_command(run.path), environment=self._environment, stderr=talk)
        self._at[name] = job, run, time.monotonic()

    def look(self) -> list[Left[J]]:
        """Who has ended since."""
        left: list[Left[J]] = []
        for _, run, _ in self._at.values():
            keep_short(run.logs / TALK)
        for name, code in self._children.look().items():
            job, _, began = self._at.pop(name)
            reason = self._reasons.pop(name, SILENT)
            if code < 0:
                self._deaths[job.name] += 1
                reason = reason if self._deaths[job.name] >= MAX_DEATHS else Message("")
            answer = parse_answer(self._children.last_words[name]) if code == 0 else None
            left.append(left_with(answer, job=job, place=name, seconds=time.monotonic() - began, reason=reason))
        return left

    def recall(self, job: J) -> None:
        """A call cannot be saved: end it. `look` tells of it."""
        for name, (given, _, _) in self._at.items():
            if given.name == job.name and name in self._children.alive:
                self._children.alive[name].terminate()

    def stop(self) -> None:
        """End them all. `look` tells of them."""
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


def left_with(answer: Mapping[str, Any] | None, *, job: J, place: str, seconds: float, reason: str) -> Left[J]:
    """Of a job with a result, or with the reason why there is none (empty: somebody has to do it again)."""
    if answer is None:
        return Left(job=job, place=place, complete=False, seconds=seconds, reason=reason)
    figures = {"seconds": answer["seconds"], **answer["figures"]}
    return Left(job=job, place=place, complete=True, seconds=seconds, figures=figures)


# -- by another machine ------------------------------------------------------------------------------------------------


def offer_call(request: Mapping[str, Any]) -> tuple[str, dict[str, tuple[Path, bytes]]]:
    """A search's request as another machine is told of it, and the files that it needs, by name with their hashes.

    Raises ResourceError.
    """
    path = Path(request["file"])
    needed = {name: path.with_name(name) for name in request["files"]}
    with storage_errors(path):
        files = {name: (file, bytes.fromhex(file_sha256(file))) for name, file in needed.items()}
    same = {key: request[key] for key in ("function", "sha256", "arguments")}
    return json.dumps({**same, "file": path.name, "packages": packages_here(request["imports"])}), files


def require_callable_here(text: str, *, files: Sequence[str]) -> dict[str, Any]:
    """A call that another machine asks for, of one of these files.

    Raises LinkError for what no search asks for, Refused where this machine's packages are others.
    """
    said = parse_object(text, most_characters=MAX_CALL_CHARACTERS)
    if said is None or not _is_call(said, files):
        raise LinkError("the call of a function cannot be used", hint="install the same version on both machines")
    _require_packages(said["packages"])
    return said


def _is_call(said: Mapping[str, Any], files: Sequence[str]) -> bool:
    arguments, packages = said.get("arguments"), said.get("packages")
    texts = [said.get("function"), said.get("sha256"), said.get("file")]
    if not all(isinstance(text, str) for text in texts) or said["file"] not in files:
        return False
    if not isinstance(arguments, dict) or not all(isinstance(each, str | int | float) for each in arguments.values()):
        return False
    return isinstance(packages, dict) and all(isinstance(version, str) for version in packages.values())


def _require_packages(wanted: Mapping[str, str]) -> None:
    found = packages_here(wanted.keys())
    other = [name for name, version in wanted.items() if found.get(name) != version]
    if other:
        raise Refused(
            "the function needs {wanted}; this machine has {found}",
            wanted=", ".join(f"{name} {wanted[name]}" for name in other),
            found=", ".join(f"{name} {found.get(name, '-')}" for name in other),
            hint="install the same versions on all machines",
        )


def write_call(call: Mapping[str, Any], run: RunDir, *, code: Path) -> None:
    """Where its process looks for it. `code`: the folder of its files. Raises ResourceError."""
    asked = {**call, "file": str(code / call["file"])}
    with storage_errors(run.path), open(run.path / REQUEST, "w", encoding="utf-8", opener=open_private) as file:
        json.dump(asked, file)


def end_of_talk(run: RunDir) -> Path | None:
    """A file with the last part of what a call printed; None: it printed nothing. Raises ResourceError."""
    talk = run.logs / TALK
    if not talk.is_file() or not talk.stat().st_size:
        return None
    last = talk.with_suffix(".last")
    with storage_errors(last), open(talk, "rb") as whole, open(last, "wb", opener=open_private) as file:
        whole.seek(max(0, os.fstat(whole.fileno()).st_size - MAX_TALK_BYTES))
        file.write(whole.read(MAX_TALK_BYTES))
    return last


def keep_talk(arrived: Path, run: RunDir) -> None:
    """Into the job's log here. Raises ResourceError."""
    if not arrived.is_file():
        return
    make_private(run.logs)
    with storage_errors(run.logs), open(run.logs / TALK, "ab", opener=open_private) as file:
        file.write(arrived.read_bytes())
