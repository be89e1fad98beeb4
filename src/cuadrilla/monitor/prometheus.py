"""Runs and their machines as Prometheus reads them: https://prometheus.io/docs/practices/naming/.

Each scrape makes its answer anew from what is watched; nothing is kept in the library's global registry. Names of runs,
machines and events come from others: the library escapes them, and there is a highest number of each.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cuadrilla.monitor.run import RunReader, machine_data

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RUN, NODE, GPU = ("run",), ("run", "node"), ("run", "node", "gpu")


@dataclass(frozen=True)
class RunMetric:
    """`key`: of the newest row of `metrics.jsonl`; its value times `scale`."""

    name: str
    help: str
    key: str
    counts: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class NodeMetric:
    """`key`: of a machine's newest usage; its value times `scale`."""

    name: str
    help: str
    key: str
    scale: float = 1.0


OF_RUNS = (
    RunMetric("versions", "Committed versions of the weights.", "version", counts=True),
    RunMetric("tokens", "Tokens trained on.", "tokens", counts=True),
    RunMetric("tokens_per_second", "Of the newest version, all machines together.", "tokens_per_second"),
    RunMetric("loss", "Of the newest version's training text, in nats per token.", "loss"),
    RunMetric("held_out_loss", "Of the newest evaluation, in nats per token.", "val_loss"),
    RunMetric(
        "held_out_compression_ratio",
        "Bits per byte of the held-out text, divided by 8: Prometheus counts in bytes.",
        "val_bits_per_byte",
        scale=1 / 8,
    ),
    RunMetric("gradient_norm", "Of the newest version's gradient.", "grad_norm"),
    RunMetric("step_seconds", "From the version before to the newest one.", "seconds"),
)
OF_NODES = (
    NodeMetric("cpu_utilization_ratio", "Busy part of what the machine may use.", "cpu_percent", 0.01),
    NodeMetric("memory_used_bytes", "Memory in use.", "memory_used_bytes"),
    NodeMetric("memory_bytes", "Memory that the machine may use.", "memory_bytes"),
    NodeMetric("process_memory_bytes", "Memory of the worker's process.", "process_memory_bytes"),
    NodeMetric("disk_free_bytes", "Free space where it works.", "disk_free_bytes"),
    NodeMetric("disk_read_bytes_per_second", "Read from its disks.", "disk_read_bytes_per_second"),
    NodeMetric("disk_written_bytes_per_second", "Written to its disks.", "disk_written_bytes_per_second"),
    NodeMetric("network_sent_bytes_per_second", "Sent by the machine.", "network_sent_bytes_per_second"),
    NodeMetric("network_received_bytes_per_second", "Received by the machine.", "network_received_bytes_per_second"),
    NodeMetric("link_sent_bytes_per_second", "Sent to the coordinator.", "sent_bytes_per_second"),
    NodeMetric("link_received_bytes_per_second", "Received from the coordinator.", "received_bytes_per_second"),
    NodeMetric("round_trip_seconds", "To the coordinator and back.", "round_trip_seconds"),
    NodeMetric("waiting_ratio", "Part of the last seconds in which the worker waited.", "waiting_part"),
    NodeMetric("temperature_celsius", "Of the processor.", "temperature_celsius"),
    NodeMetric("battery_ratio", "Charge of the battery.", "battery_percent", 0.01),
)
OF_GPUS = (
    NodeMetric("utilization_ratio", "Busy part of the GPU.", "busy_percent", 0.01),
    NodeMetric("memory_used_bytes", "Memory of the GPU in use.", "memory_used_bytes"),
    NodeMetric("memory_bytes", "Memory of the GPU.", "memory_bytes"),
    NodeMetric("temperature_celsius", "Of the GPU.", "temperature_celsius"),
    NodeMetric("power_watts", "Drawn by the GPU.", "power_watts"),
)


def metrics_text(runs: Iterable[tuple[str, RunReader]]) -> bytes:
    """Of runs by name, in the text format."""
    registry = CollectorRegistry()
    registry.register(_Crew(list(runs)))
    return generate_latest(registry)


class _Crew(Collector):
    def __init__(self, runs: list[tuple[str, RunReader]]) -> None:
        self._runs = [(name, run, [machine_data(machine) for machine in run.machines()]) for name, run in runs]

    def collect(self) -> Iterator[Metric]:
        yield from self._of_runs()
        yield from self._of_nodes()
        for metric in OF_NODES:
            family = _gauge(f"node_{metric.name}", metric.help, NODE)
            for labels, usage in self._usages():
                _add(family, labels, usage, metric)
            yield family
        for metric in OF_GPUS:
            family = _gauge(f"gpu_{metric.name}", metric.help, GPU)
            for labels, usage in self._usages():
                for gpu in usage.get("gpus", ()):
                    _add(family, [*labels, str(gpu.get("index", ""))], gpu, metric)
            yield family

    def _of_runs(self) -> Iterator[Metric]:
        for metric in OF_RUNS:
            kind = CounterMetricFamily if metric.counts else GaugeMetricFamily
            family = kind(f"cuadrilla_{metric.name}", metric.help, labels=RUN)
            for name, watched, _ in self._runs:
                if (value := watched.last.get(metric.key)) is not None:
                    family.add_metric([_text(name)], value * metric.scale)
            yield family
        active = _gauge("run_active", "1: its training runs.", RUN)
        events = CounterMetricFamily("cuadrilla_events", "What has happened, by kind.", labels=("run", "event"))
        for name, watched, _ in self._runs:
            active.add_metric([_text(name)], watched.is_running)
            for happened, count in list(watched.counts.items()):
                events.add_metric([_text(name), _text(happened)], count)
        yield active
        yield events

    def _of_nodes(self) -> Iterator[Metric]:
        up = _gauge("node_up", "1: it works in the run now.", NODE)
        share = _gauge("node_share", "Part of the newest steps that it computed.", NODE)
        speed = _gauge("node_tokens_per_second", "Its part of the crew's speed in the newest steps.", NODE)
        lost = CounterMetricFamily("cuadrilla_node_losses", "How often it left or was lost.", labels=NODE)
        seen = _gauge("node_last_seen_timestamp_seconds", "When it last told of itself.", NODE)
        for name, _, rows in self._runs:
            for row in rows:
                labels = [_text(name), _text(row["name"])]
                up.add_metric(labels, row["here"])
                if row["works"]:
                    share.add_metric(labels, row["share"] or 0.0)
                    speed.add_metric(labels, (row["tokens_per_second"] or 0.0) if row["here"] else 0.0)
                    lost.add_metric(labels, row["lost"])
                if row.get("seen"):
                    seen.add_metric(labels, row["seen"])
        yield from (up, share, speed, lost, seen)

    def _usages(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Of machines that work now: what one said before it left says nothing of it."""
        for name, _, rows in self._runs:
            for row in rows:
                if row["here"]:
                    yield [_text(name), _text(row["name"])], row | row["usage"]


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"cuadrilla_{name}", text, labels=labels)


def _add(family: GaugeMetricFamily, labels: list[str], values: dict[str, Any], metric: NodeMetric) -> None:
    value = values.get(metric.key)
    if isinstance(value, int | float):
        family.add_metric(labels, value * metric.scale)


def _text(value: str) -> str:
    """Without halves of characters, which UTF-8 cannot write."""
    return value.encode("utf-8", "replace").decode("utf-8")
