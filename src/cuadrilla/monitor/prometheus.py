"""Runs and their machines as Prometheus reads them: https://prometheus.io/docs/practices/naming/.

Every number in the data of a run, a machine and a GPU is a gauge with the number's key as name: `cuadrilla_`,
`cuadrilla_node_` and `cuadrilla_gpu_`. Each scrape makes its answer anew from the run readers; nothing is kept in the
library's global registry. Names of runs, machines and events are foreign text, which the library escapes.
"""

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cuadrilla.monitor.follow import figures
from cuadrilla.monitor.run import RUNNING, RunReader

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RENAMED = {
    "seconds": ("step_seconds", 1.0),
    "grad_norm": ("gradient_norm", 1.0),
    "val_loss": ("held_out_loss", 1.0),
    "val_bits_per_byte": ("held_out_compression_ratio", 1 / 8),
    "val_bits_per_byte_error": ("held_out_compression_ratio_error", 1 / 8),
    "waiting_part": ("waiting_ratio", 1.0),
    "cpu_percent": ("cpu_utilization_ratio", 0.01),
    "busy_percent": ("utilization_ratio", 0.01),
    "sent_bytes_per_second": ("link_sent_bytes_per_second", 1.0),
    "received_bytes_per_second": ("link_received_bytes_per_second", 1.0),
}
"""Name and factor of a number, by its key in the data of a run, machine or GPU. Other numbers keep their key."""
COUNTED = {"version": "versions", "tokens": "tokens"}
"""Numbers of a run that only grow: counters."""
NO_GAUGES = {*COUNTED, "time", "index"}
HELP = "See docs/watch.md."
Named = tuple[list[str], dict[str, Any]]
"""Values of the labels, and the data of the run, machine or GPU."""


def metrics_text(runs: Iterable[tuple[str, RunReader]]) -> bytes:
    """The metrics of runs, by name, in Prometheus's text format."""
    return generate_latest(_Crew(list(runs)))


class _Crew(Collector):
    def __init__(self, runs: list[tuple[str, RunReader]]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        runs = [([_text(name)], run.data(now=time.time())) for name, run in self._runs]
        machines = [([*name, _text(each["name"])], each) for name, run in runs for each in run["machines"]]
        working = [(labels, {**each, **each["usage"]}) for labels, each in machines if each["here"]]
        gpus = [([*labels, str(gpu["index"])], gpu) for labels, each in working for gpu in each.get("gpus", ())]
        yield from _gauges("", ("run",), runs)
        for key, name in COUNTED.items():
            yield _counter(name, ("run",), [(labels, head[key]) for labels, head in runs if key in head])
        active = [(labels, {"active": int(head["state"] == RUNNING)}) for labels, head in runs]
        yield from _gauges("run_", ("run",), active)
        counts = [([_text(name), _text(kind)], n) for name, run in self._runs for kind, n in run.counts.copy().items()]
        yield _counter("events", ("run", "event"), counts)
        node = ("run", "node")
        yield from _gauges("node_", node, [(labels, {"up": int(each["here"])}) for labels, each in machines])
        lost = [(labels, each["lost"]) for labels, each in machines if each["works"]]
        yield _counter("node_losses", node, lost)
        yield from _gauges("node_", node, working)
        yield from _gauges("gpu_", (*node, "gpu"), gpus)


def _gauges(prefix: str, labels: tuple[str, ...], named: Iterable[Named]) -> Iterator[Metric]:
    """A gauge for each number in the data."""
    families: dict[str, GaugeMetricFamily] = {}
    for values, data in named:
        for key, value in figures(data):
            if key not in NO_GAUGES:
                key, factor = RENAMED.get(key, (key, 1.0))
                name = f"cuadrilla_{prefix}{re.sub('[^a-zA-Z0-9_]', '_', key)}"
                family = families.setdefault(name, GaugeMetricFamily(name, HELP, labels=labels))
                family.add_metric(values, value * factor)
    yield from families.values()


def _counter(name: str, labels: tuple[str, ...], counts: Iterable[tuple[list[str], float]]) -> Metric:
    family = CounterMetricFamily(f"cuadrilla_{name}", HELP, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


def _text(value: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot encode."""
    return value.encode("utf-8", "replace").decode("utf-8")
