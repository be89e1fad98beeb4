"""Metrics of a service for Prometheus, named after https://prometheus.io/docs/practices/naming/."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cuadrilla.serve.batching import Batcher

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Meters:
    """The metrics of one service: tokens, times to them, slots, the queue. A proxy counts calls by route and status."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.tokens = self._counter("generated_tokens", "Tokens generated.")
        self.first_token_seconds = self._histogram("first_token_seconds", "From a call to its first token.")
        self.between_tokens_seconds = self._histogram("between_tokens_seconds", "From a token to the next.")
        self._slots = self._gauge("slots", "Sequences that can be continued together.")
        self._busy_slots = self._gauge("busy_slots", "Sequences that are being continued.")
        self._waiting = self._gauge("waiting", "Sequences that wait for a slot.")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"cuadrilla_{name}", text, ("model",), registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"cuadrilla_{name}", text, buckets=SECONDS, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"cuadrilla_{name}", text, ("model",), registry=self._registry)

    def watch(self, model: str, batcher: Batcher) -> None:
        """Add a model's slots and queue. They are read whenever the metrics are."""
        self._slots.labels(model).set(batcher.slots)
        self._busy_slots.labels(model).set_function(lambda: batcher.busy_slots)
        self._waiting.labels(model).set_function(lambda: batcher.waiting)

    def text(self) -> bytes:
        return generate_latest(self._registry)
