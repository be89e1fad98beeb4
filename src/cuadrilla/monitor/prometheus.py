"""Runs and their machines as Prometheus reads them: https://prometheus.io/docs/practices/naming/.

Each scrape makes its answer anew from the run readers; nothing is kept in the library's global registry. Names of runs,
machines and events are foreign text, which the library escapes.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cuadrilla.monitor.run import RUNNING, RunReader

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OF_RUNS = (  # name, help, key in the data of a run, factor
    ("tokens_per_second", "Mean of the newest steps, all machines together.", "tokens_per_second", 1.0),
    ("loss", "Of the newest version's training text, in nats per token.", "loss", 1.0),
    ("held_out_loss", "Of the newest evaluation, in nats per token.", "val_loss", 1.0),
    ("held_out_compression_ratio", "Bits per byte of the held-out text, divided by 8.", "val_bits_per_byte", 1 / 8),
    ("gradient_norm", "Of the newest version's gradient.", "grad_norm", 1.0),
    ("step_seconds", "From the version before to the newest one.", "seconds", 1.0),
)
COUNTED = (
    ("versions", "Committed versions of the weights.", "version", 1.0),
    ("tokens", "Tokens trained on.", "tokens", 1.0),
)
OF_NODES = (  # only of machines that work now: the last figures of one that left are out of date
    ("share", "Part of the newest steps that it computed.", "share", 1.0),
    ("tokens_per_second", "Its part of the crew's speed in the newest steps.", "tokens_per_second", 1.0),
    ("cpu_utilization_ratio", "Busy part of what the machine may use.", "cpu_percent", 0.01),
    ("memory_used_bytes", "Memory in use.", "memory_used_bytes", 1.0),
    ("memory_bytes", "Memory that the machine may use.", "memory_bytes", 1.0),
    ("disk_free_bytes", "Free space where it works.", "disk_free_bytes", 1.0),
    ("link_sent_bytes_per_second", "Sent to the coordinator.", "sent_bytes_per_second", 1.0),
    ("link_received_bytes_per_second", "Received from the coordinator.", "received_bytes_per_second", 1.0),
    ("round_trip_seconds", "To the coordinator and back.", "round_trip_seconds", 1.0),
    ("waiting_ratio", "Part of the last seconds in which the worker waited.", "waiting_part", 1.0),
    ("temperature_celsius", "Of the processor.", "temperature_celsius", 1.0),
)
OF_GPUS = (
    ("utilization_ratio", "Busy part of the GPU.", "busy_percent", 0.01),
    ("memory_used_bytes", "Memory of the GPU in use.", "memory_used_bytes", 1.0),
    ("memory_bytes", "Memory of the GPU.", "memory_bytes", 1.0),
    ("temperature_celsius", "Of the GPU.", "temperature_celsius", 1.0),
    ("power_watts", "Drawn by the GPU.", "power_watts", 1.0),
)
Named = tuple[list[str], dict[str, Any]]
"""Values of the labels, and the data of the run, machine or GPU."""


def metrics_text(runs: Iterable[tuple[str, RunReader]]) -> bytes:
    """The metrics of runs, by name, in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Crew(list(runs)))
    return generate_latest(registry)


class _Crew(Collector):
    def __init__(self, runs: list[tuple[str, RunReader]]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        runs = [([_text(name)], run.data(now=time.time())) for name, run in self._runs]
        machines = [([*name, _text(each["name"])], each) for name, run in runs for each in run["machines"]]
        working = [(labels, {**each, **each["usage"]}) for labels, each in machines if each["here"]]
        gpus = [([*labels, str(gpu["index"])], gpu) for labels, each in working for gpu in each.get("gpus", ())]
        yield from _gauges("", ("run",), OF_RUNS, runs)
        for name, text, key, _ in COUNTED:
            yield _counter(name, text, ("run",), [(labels, head[key]) for labels, head in runs if key in head])
        active = [(labels, {"active": head["state"] == RUNNING}) for labels, head in runs]
        yield from _gauges("run_", ("run",), (("active", "1: its training runs.", "active", 1.0),), active)
        counts = [([_text(name), _text(kind)], n) for name, run in self._runs for kind, n in run.counts.copy().items()]
        yield _counter("events", "What has happened, by kind.", ("run", "event"), counts)
        node = ("run", "node")
        yield from _gauges("node_", node, (("up", "1: it works in the run now.", "here", 1.0),), machines)
        lost = [(labels, each["lost"]) for labels, each in machines if each["works"]]
        yield _counter("node_losses", "How often it left or was lost.", node, lost)
        yield from _gauges("node_", node, OF_NODES, working)
        yield from _gauges("gpu_", (*node, "gpu"), OF_GPUS, gpus)


def _gauges(
    prefix: str, labels: tuple[str, ...], table: Iterable[tuple[str, str, str, float]], named: Sequence[Named]
) -> Iterator[Metric]:
    for name, text, key, factor in table:
        family = GaugeMetricFamily(f"cuadrilla_{prefix}{name}", text, labels=labels)
        for values, known in named:
            if known.get(key) is not None:
                family.add_metric(values, known[key] * factor)
        yield family


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[list[str], float]]) -> Metric:
    family = CounterMetricFamily(f"cuadrilla_{name}", text, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


def _text(value: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot encode."""
    return value.encode("utf-8", "replace").decode("utf-8")
