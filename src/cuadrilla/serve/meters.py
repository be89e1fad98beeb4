"""Metrics of a service for Prometheus, named after https://prometheus.io/docs/practices/naming/."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cuadrilla.serve.batching import Batcher

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Meters:
    """The metrics of a language model: tokens, times to them, its slots and its queue, which are read whenever the
    metrics are. A proxy counts calls by route and status."""

    def __init__(self, model: str, batcher: Batcher) -> None:
        self._model, self._registry = model, CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.tokens = self._counter("generated_tokens", "Tokens generated.")
        self.first_token_seconds = self._histogram("first_token_seconds", "From a call to its first token.")
        self.between_tokens_seconds = self._histogram("between_tokens_seconds", "From a token to the next.")
        self._gauge("slots", "Sequences that can be continued together.", lambda: batcher.slots)
        self._gauge("busy_slots", "Sequences that are being continued.", lambda: batcher.busy_slots)
        self._gauge("waiting", "Sequences that wait for a slot.", lambda: batcher.waiting)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"cuadrilla_{name}", text, ("model",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"cuadrilla_{name}", text, buckets=SECONDS, registry=self._registry)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"cuadrilla_{name}", text, ("model",), registry=self._registry)
        gauge.labels(self._model).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self._registry)
