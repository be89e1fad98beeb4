"""What a service counts, for Prometheus: https://prometheus.io/docs/practices/naming/."""

import logging
import time
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cuadrilla.serve.batching import Busyness
from cuadrilla.serve.edge import Application, Event, Receive, Scope, Send

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
OTHER = "other"
log = logging.getLogger(__name__)


class CallMeters:
    """Calls of a service or a gateway; `routes`: those that are counted by name."""

    def __init__(self, prefix: str, *, routes: Collection[str], registry: CollectorRegistry) -> None:
        self._routes = frozenset(routes)
        names = ("route", "status")
        self._calls = Counter(f"{prefix}_calls", "Calls by route and status.", names, registry=registry)
        self._seconds = Histogram(
            f"{prefix}_call_seconds", "From a call's head to its end.", ("route",), buckets=SECONDS, registry=registry
        )

    def counting(self, app: Application) -> Application:
        """`app` with each of its calls counted and logged, those that are refused included."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            route = scope["path"] if scope["path"] in self._routes else OTHER
            began, status = time.perf_counter(), "cut off"

            async def sent(event: Event) -> None:
                nonlocal status
                if event["type"] == "http.response.start":
                    status = str(event["status"])
                await send(event)

            try:
                await app(scope, receive, sent)
            finally:
                self._calls.labels(route, status).inc()
                seconds = time.perf_counter() - began
                self._seconds.labels(route).observe(seconds)
                log.info("%s %s in %.3f s", route, status, seconds)

        return counted


class Meters:
    """Of one service."""

    def __init__(self, *, routes: Collection[str]) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        registry = self._registry
        self.calls = CallMeters("cuadrilla", routes=routes, registry=registry)
        self.prompt_tokens = Counter("cuadrilla_prompt_tokens", "Tokens of prompts.", ("model",), registry=registry)
        self.tokens = Counter("cuadrilla_generated_tokens", "Tokens generated.", ("model",), registry=registry)
        self.waiting_seconds = Histogram(
            "cuadrilla_waiting_seconds", "From a call to its slot.", buckets=SECONDS, registry=registry
        )
        self.first_token_seconds = Histogram(
            "cuadrilla_first_token_seconds", "From a call to its first token.", buckets=SECONDS, registry=registry
        )
        self.between_tokens_seconds = Histogram(
            "cuadrilla_between_tokens_seconds", "From a token to the next.", buckets=SECONDS, registry=registry
        )

    def watch(self, model: str, busyness: Callable[[], Busyness]) -> None:
        """Show how busy a model is, whenever somebody looks."""
        for name, help_text, read in (
            ("slots", "Sequences that can be continued together.", lambda: busyness().slots),
            ("busy_slots", "Sequences that are being continued.", lambda: busyness().busy),
            ("waiting", "Sequences that wait for a slot.", lambda: busyness().waiting),
            ("tokens_per_second", "Generated while working, lately.", lambda: busyness().tokens_per_second),
            ("prefix_bytes", "Keys and values of prompts that are kept.", lambda: busyness().prefix_bytes),
        ):
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"cuadrilla_{name}", help_text, ("model",), registry=self._registry)
            self._gauges[name].labels(model).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self._registry)
