"""Metrics of a service for Prometheus, named after https://prometheus.io/docs/practices/naming/."""

import time
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cuadrilla.serve.batching import Batcher
from cuadrilla.serve.edge import Application, Event, Receive, Scope, Send

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
OTHER = "other"


class Meters:
    """The metrics of one service. Calls are counted for each of `routes`, and together for all others."""

    def __init__(self, *, routes: Collection[str]) -> None:
        self._routes = frozenset(routes)
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self.tokens = self._counter("generated_tokens", "Tokens generated.", "model")
        self.first_token_seconds = self._histogram("first_token_seconds", "From a call to its first token.")
        self.between_tokens_seconds = self._histogram("between_tokens_seconds", "From a token to the next.")
        self._calls = self._counter("calls", "Calls by route and status.", "route", "status")
        self._call_seconds = self._histogram("call_seconds", "From a call's head to its end.", "route")
        self._slots = self._gauge("slots", "Sequences that can be continued together.")
        self._busy_slots = self._gauge("busy_slots", "Sequences that are being continued.")
        self._waiting = self._gauge("waiting", "Sequences that wait for a slot.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cuadrilla_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"cuadrilla_{name}", text, labels, buckets=SECONDS, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"cuadrilla_{name}", text, ("model",), registry=self._registry)

    def watch(self, model: str, batcher: Batcher) -> None:
        """Add a model's slots and queue. They are read whenever the metrics are."""
        self._slots.labels(model).set(batcher.slots)
        self._busy_slots.labels(model).set_function(lambda: batcher.busy_slots)
        self._waiting.labels(model).set_function(lambda: batcher.waiting)

    def counting(self, app: Application) -> Application:
        """`app`, with all calls counted, including refused ones."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
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
                self._call_seconds.labels(route).observe(time.perf_counter() - began)

        return counted

    def text(self) -> bytes:
        return generate_latest(self._registry)
