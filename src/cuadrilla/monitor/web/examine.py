"""`cuadrilla doctor --json` in a child process, for the page: it may take seconds, and a driver may hang in it."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from typing import Any

from cuadrilla.messages import Message, translated

COMMAND = (sys.executable, "-m", "cuadrilla")
MOST_SECONDS = 120.0
MOST_BYTES = 2**20


class Examiner:
    """One examination at a time; who asks meanwhile waits for its turn. `command`: in tests another program."""

    def __init__(self, *, command: Sequence[str] = COMMAND, most_seconds: float = MOST_SECONDS) -> None:
        self._command, self._most_seconds = tuple(command), most_seconds
        self._turn = asyncio.Lock()

    async def examine(self, *, language: str) -> dict[str, Any]:
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
            return read_findings(output, child.returncode, language=language)


def read_findings(output: bytes, code: int | None, *, language: str) -> dict[str, Any]:
    """Its exit code tells what it found, and 2 that there is no such command. Causes are in this language."""
    try:
        found = json.loads(output[:MOST_BYTES], parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {"failed": "missing" if code == 2 and not output.strip() else "broken"}
    findings = found.get("findings") if isinstance(found, dict) else None
    if not isinstance(findings, list):
        return {"failed": "broken"}
    return {"found": [_shown(finding, language) for finding in findings if isinstance(finding, dict)]}


def _shown(finding: dict[str, Any], language: str) -> dict[str, str]:
    shown = {key: str(finding.get(key) or "") for key in ("check", "level", "cause", "remedy", "command", "shell")}
    template, fields = finding.get("template"), finding.get("fields")
    if isinstance(template, str) and isinstance(fields, dict) and translated(template, language) != template:
        with contextlib.suppress(KeyError, ValueError, IndexError):
            shown["cause"] = Message(template, **fields).in_language(language)
    return shown
