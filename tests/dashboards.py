"""A dashboard in this process, behind the product's edge, on a free port of the loopback, and a client for it."""

import json
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cuadrilla.monitor.web.app import WITHOUT_TOKEN, make_dashboard
from cuadrilla.monitor.web.runs import Runs
from cuadrilla.serve.edge import Edge
from tests.loopback import ask, listening

TOKEN = "correct-horse-battery-staple"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class ShownDashboard:
    url: str

    @property
    def link(self) -> str:
        return f"{self.url}/#token={TOKEN}"

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body and headers of an answer. `headers`: with `_` for `-`; they may replace the token."""
        given = BEARER | {name.replace("_", "-"): value for name, value in headers.items()}
        given = {name: value for name, value in given.items() if value}
        return ask(self.url + path, headers=given, method=method, body={} if method == "POST" else None)

    @contextmanager
    def following(self, key: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The messages that the stream of a run sends."""
        request = urllib.request.Request(f"{self.url}/api/follow?of={quote(key)}", headers=BEARER)
        with urllib.request.urlopen(request, timeout=60) as answer:
            yield (json.loads(line[5:]) for line in answer if line.startswith(b"data:"))


@contextmanager
def shown(*places: Path) -> Iterator[ShownDashboard]:
    ends = threading.Event()
    dashboard = make_dashboard(Runs(places), ends=ends)
    with listening(Edge(dashboard, key=TOKEN, open_to_all=WITHOUT_TOKEN)) as url:
        try:
            yield ShownDashboard(url)
        finally:
            ends.set()
