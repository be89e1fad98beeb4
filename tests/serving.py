"""A service in a process of its own, on a free port of the loopback."""

import json
import re
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commands import COMMAND, wait_for

URL = re.compile(r"serving +(https?://\S+)")


@dataclass
class Service:
    process: "subprocess.Popen[str]"
    url: str
    said: Path

    def ask(self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON (or text) of an answer; a body is posted as JSON."""
        given = {"Content-Type": "application/json", **(headers or {})}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _value(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _value(error.read())

    def figure(self, name: str, model: str, *, headers: Mapping[str, str] | None = None) -> int:
        """One of /metrics, 0 where it is not there yet."""
        lines = self.ask("/metrics", headers=headers)[1].splitlines()
        start = f'cuadrilla_{name}{{model="{model}"}} '
        return int(float(next((line.removeprefix(start) for line in lines if line.startswith(start)), "0")))

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)


@contextmanager
def serving(*arguments: object, cwd: Path | None = None) -> Iterator[Service]:
    """`cuadrilla serve ARGUMENTS`, until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said.txt"
        with open(said, "w") as file:
            command = [*COMMAND, "serve", *map(str, arguments), "--port", "0"]
            process = subprocess.Popen(command, stdout=file, stderr=file, text=True, cwd=cwd)
        try:
            wait_for(lambda: URL.search(said.read_text()) is not None or process.poll() is not None)
            found = URL.search(said.read_text())
            assert found, said.read_text()
            yield Service(process, found[1], said)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _value(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
