"""`cuadrilla doctor --json` in a child process, for the page: it may take seconds, and a driver may hang in it."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from typing import Any

from cuadrilla.messages import ENGLISH, LANGUAGES

COMMAND = (sys.executable, "-m", "cuadrilla")
MOST_SECONDS = 120.0
MOST_BYTES = 2**20
NAMES, TEXTS = ("check", "level", "command", "shell"), ("cause", "remedy", "place")


class Examiner:
    """One examination at a time; who asks meanwhile waits for its turn. `command`: in tests another program."""

    def __init__(self, *, command: Sequence[str] = COMMAND, most_seconds: float = MOST_SECONDS) -> None:
        self._command, self._most_seconds = tuple(command), most_seconds
        self._turn = asyncio.Lock()

    async def examine(self) -> dict[str, Any]:
        """`found`: what it printed; or `failed`: `missing`, `slow` or `broken`."""
        async with self._turn:
            arguments = (*self._command, "doctor", "--json")
            child = await asyncio.create_subprocess_exec(*arguments, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
            try:
                async with asyncio.timeout(self._most_seconds):
                    output, _ = await child.communicate()
            except TimeoutError:
                return {"failed": "slow"}
            finally:
                if child.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.kill()
                    await child.wait()
            return read_findings(output, child.returncode)


def read_findings(output: bytes, code: int | None) -> dict[str, Any]:
    """Its exit code tells what it found, and 2 that there is no such command. Texts are in all languages, by name."""
    try:
        found = json.loads(output[:MOST_BYTES], parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {"failed": "missing" if code == 2 and not output.strip() else "broken"}
    findings = found.get("findings") if isinstance(found, dict) else None
    if not isinstance(findings, list):
        return {"failed": "broken"}
    return {"found": [_shown(finding) for finding in findings if isinstance(finding, dict)]}


def _shown(finding: dict[str, Any]) -> dict[str, Any]:
    others = finding.get("translations")
    told = {**(others if isinstance(others, dict) else {}), ENGLISH: finding}
    return {**_texts(finding, NAMES), "texts": {language: _texts(told.get(language), TEXTS) for language in LANGUAGES}}


def _texts(found: object, names: Sequence[str]) -> dict[str, str]:
    return {name: str(found.get(name) or "") if isinstance(found, dict) else "" for name in names}
