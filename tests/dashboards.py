"""A dashboard in this process, behind the product's edge, on a free port of the loopback, and a client for it."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn

from cuadrilla.monitor.web.app import WITHOUT_TOKEN, Dashboard
from cuadrilla.monitor.web.runs import Runs
from cuadrilla.serve.edge import Edge
from tests.commands import wait_for

TOKEN = "correct-horse-battery-staple"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class ShownDashboard:
    url: str
    dashboard: Dashboard

    @property
    def link(self) -> str:
        return f"{self.url}/#token={TOKEN}"

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body and headers of an answer. `headers`: with `_` for `-`; they may replace the token."""
        given = BEARER | {name.replace("_", "-"): value for name, value in headers.items()}
        given = {name: value for name, value in given.items() if value}
        body = b"{}" if method == "POST" else None
        if body:
            given["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, headers=given, method=method, data=body)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers

    @contextmanager
    def following(self, key: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The messages that the stream of a run sends."""
        request = urllib.request.Request(f"{self.url}/api/follow?of={quote(key)}", headers=BEARER)
        with urllib.request.urlopen(request, timeout=60) as answer:
            yield (json.loads(line[5:]) for line in answer if line.startswith(b"data:"))


@contextmanager
def shown(*places: Path, queue: Path | None = None) -> Iterator[ShownDashboard]:
    """Serve a dashboard. The product's `listen` is not used, since it works only in the main thread of a process."""
    dashboard = Dashboard(Runs(places, queue=queue))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        edge = Edge(dashboard.app, key=TOKEN, open_to_all=WITHOUT_TOKEN)
        config = uvicorn.Config(edge, log_config=None, ws="none", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="dashboard")
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            yield ShownDashboard(f"http://{host}", dashboard)
        finally:
            dashboard.drain()
            server.should_exit = True
            thread.join()
