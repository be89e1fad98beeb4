"""The metrics of runs for Prometheus: names with units, and values of the newest rows."""

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cuadrilla.monitor.prometheus import metrics_text
from cuadrilla.monitor.run import RunReader
from cuadrilla.rundir import append_event
from tests.watched import WrittenCrew, add_rows, hold_lock, rows_of

PROMTOOL = shutil.which("promtool")
Sample = tuple[str, tuple[tuple[str, str], ...]]


def read(text: bytes) -> dict[Sample, float]:
    """By name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def of(found: dict[Sample, float], name: str, **labels: str) -> float | None:
    return found.get((f"cuadrilla_{name}", tuple(sorted(labels.items()))))


@pytest.fixture
def running(tmp_path: Path) -> RunReader:
    """Three machines, of which one has left; it holds the lock of a run that trains."""
    crew = WrittenCrew(
        folder=tmp_path / "casa", speeds={"ana": 3.0, "luis": 1.0, "eva": 1.0}, rounds=80, state="running"
    )
    run = crew.write()
    add_rows(run.metrics, [crew.row(version, names=("ana", "luis")) for version in range(81, 121)])
    append_event(run.events, "left", worker="eva", reason="the connection ended")
    for name in crew.speeds:
        usage = crew.usage(name, crew.began + 5, step=3)
        gpu = {"index": 0, "name": "RTX", "busy_percent": 97.0, "memory_used_bytes": 2**33, "power_watts": 200.5}
        add_rows(rows_of(run, name), [usage | ({"gpus": [gpu]} if name == "ana" else {})])
    hold_lock(run)
    return RunReader(run)


def test_a_running_crew(running: RunReader) -> None:
    found = read(metrics_text([("casa", running)]))
    assert of(found, "run_active", run="casa") == 1
    assert of(found, "versions_total", run="casa") == 120
    assert of(found, "tokens_total", run="casa") == 120 * 3328
    head = running.data(now=0.0)
    assert of(found, "loss", run="casa") == pytest.approx(head["loss"])
    assert of(found, "held_out_compression_ratio", run="casa") == pytest.approx(head["val_bits_per_byte"] / 8)
    assert [of(found, "node_up", run="casa", node=name) for name in ("ana", "luis", "eva")] == [1, 1, 0]
    assert of(found, "node_share", run="casa", node="ana") == pytest.approx(0.75)
    speeds = [of(found, "node_tokens_per_second", run="casa", node=name) or 0 for name in ("ana", "luis", "eva")]
    assert sum(speeds) == pytest.approx(head["tokens_per_second"], rel=1e-3)
    assert of(found, "tokens_per_second", run="casa") == head["tokens_per_second"]
    assert of(found, "node_losses_total", run="casa", node="eva") == 1
    assert of(found, "events_total", run="casa", event="joined") == 3
    assert of(found, "gpu_utilization_ratio", run="casa", node="ana", gpu="0") == pytest.approx(0.97)
    assert of(found, "gpu_power_watts", run="casa", node="ana", gpu="0") == 200.5
    assert of(found, "node_memory_bytes", run="casa", node="luis") == 16 * 2**30
    assert of(found, "node_round_trip_seconds", run="casa", node="luis") == pytest.approx(0.0021)
    assert of(found, "node_cpu_utilization_ratio", run="casa", node="eva") is None  # it has left


def test_what_a_task_of_one_s_own_measures(running: RunReader) -> None:
    add_rows(running.run.metrics, [{"version": 121, "val_top-5 right": 0.5}])
    assert of(read(metrics_text([("casa", running)])), "val_top_5_right", run="casa") == 0.5


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt install prometheus")
def test_promtool_finds_nothing(running: RunReader) -> None:
    assert PROMTOOL is not None
    text = metrics_text([("casa", running)])
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")


def test_grafana_asks_for_what_there_is(running: RunReader) -> None:
    """Each metric in a panel of the Grafana dashboard is one that a crew has."""
    text = (resources.files("cuadrilla.monitor") / "grafana/dashboards/cuadrilla.json").read_text(encoding="utf-8")
    queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"cuadrilla_\w+", query)}
    there = {name for name, _ in read(metrics_text([("casa", running)]))}
    assert len(queries) > 12
    assert asked - there == {"cuadrilla_gpu_temperature_celsius"}  # this card does not report it
