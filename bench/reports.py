"""What it costs the coordinator to hear how a hundred machines are: processor and bytes, beside heartbeats alone.

    unshare --net sh -c 'ip link set lo up; python -m bench.reports [--workers 100] [--seconds 20] [--turns 3]'

The workers are sessions of another process, with keys and connections of their own; each sends a report with a line of
its log every five seconds. Bytes are those of the loopback, so the benchmark wants a network of its own (or nobody else
on it). In turns with and without reports; `added` is the difference of the medians.
"""

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil
import torch

from bench.common import report as tell
from cuadrilla.crew.reporting import REPORT_SECONDS
from cuadrilla.host.gpus import GpuUsage
from cuadrilla.host.usage import Sampler
from cuadrilla.link.base import Hello, NodeReport, Progress, SaidLine, ToCoordinator
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import Identity, open_coordinator
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.offer import Offer
from cuadrilla.link.server import CrewServer
from cuadrilla.link.wire import Layout
from cuadrilla.train.nodelog import NodeLogs
from tests.crews import join

LAYOUT = Layout.of({"weight": torch.zeros(4)})
GPU = GpuUsage(index=0, name="NVIDIA GeForce RTX 4070 Ti", busy_percent=97.0, memory_used_bytes=2**33,
               memory_bytes=12 * 2**30, temperature_celsius=68.0, power_watts=241.0)  # fmt: skip
OPENING_SECONDS = 0.3
"""The gate lets an address open so many connections a second."""
LINE = SaidLine(level="warning", text="out of memory with 16 sequences in a pass: from now on 8")


class Writer:
    """A receiver that keeps what is reported, as a run does."""

    def __init__(self, folder: Path) -> None:
        self.logs, self.heartbeats, self.reports = NodeLogs(folder), 0, 0

    def deliver(self, worker: str, message: ToCoordinator) -> None: ...

    def heard(self, _worker: str, _progress: Progress) -> None:
        self.heartbeats += 1

    def reported(self, worker: str, report: NodeReport) -> None:
        self.reports += 1
        self.logs.report(worker, report)

    def left(self, worker: str, reason: str) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = open_coordinator(Path(folder, "crew"))
        nodes = AllowList(Path(folder, "crew", "nodes.json"))
        identities = []
        for number in range(arguments.workers):
            identity = join(Path(folder, f"{number}"), name=f"node-{number}", crew=keys, nodes=nodes)
            identities.append(identity)
        writer = Writer(Path(folder, "nodes"))
        server = CrewServer(
            keys=keys, nodes=nodes, receiver=writer, offer=Offer(config="{}", files={}), parameters=LAYOUT,
            contribution=LAYOUT,
        )  # fmt: skip
        address = f"127.0.0.1:{server.serve('127.0.0.1:0')}"
        try:
            tell("reports", workers=arguments.workers, **_measured(address, identities, writer, arguments))
        finally:
            server.close()


def _measured(
    address: str, identities: Sequence[Identity], writer: Writer, arguments: argparse.Namespace
) -> dict[str, object]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reports, ended = spawn.Event(), spawn.Event()
    crew = spawn.Process(target=work, args=(address, list(identities), theirs, reports, ended))
    crew.start()
    try:
        sampled = ours.recv()
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(arguments.turns):
            for with_reports in (False, True):
                (reports.set if with_reports else reports.clear)()
                time.sleep(1.0)
                found[with_reports].append(_costs(arguments.seconds))
    finally:
        ended.set()
        crew.join()
    cpu, rate = ({kind: statistics.median(each[place] for each in turns) for kind, turns in found.items()}
                 for place in (0, 1))  # fmt: skip
    return {
        "reports": writer.reports,
        "heartbeats": writer.heartbeats,
        "cpu_percent": {"heartbeats": cpu[False], "with reports": cpu[True], "added": cpu[True] - cpu[False]},
        "bytes_per_second": {"heartbeats": rate[False], "with reports": rate[True], "added": rate[True] - rate[False]},
        "sample_cpu_seconds": sampled,
    }


def _costs(seconds: float) -> tuple[float, float]:
    """Of this process, in percent of a core; bytes a second over the loopback."""
    before, began, sent = time.process_time(), time.perf_counter(), psutil.net_io_counters(pernic=True)["lo"].bytes_recv
    time.sleep(seconds)
    took = time.perf_counter() - began
    return (
        100 * (time.process_time() - before) / took,
        (psutil.net_io_counters(pernic=True)["lo"].bytes_recv - sent) / took,
    )


def work(address: str, identities: list[Identity], pipe: Pipe, reports: Event, ended: Event) -> None:
    """A crew of sessions, in a process of its own."""
    connections = [Connection(address, identity=identity) for identity in identities]
    sessions = []
    for connection in connections:
        connection.describe()  # one by one: an address has few seats for those who are not known yet
        sessions.append(connection.session(parameters=LAYOUT))
        sessions[-1].call(Hello(speed_hint=1.0))
        time.sleep(OPENING_SECONDS)
    with Sampler(folder=Path.cwd()) as sampler:
        sampler.sample()
        began = time.process_time()
        usage = [sampler.sample() for _ in range(20)][-1]
        pipe.send((time.process_time() - began) / 20)
    usage = replace(usage, gpus=(GPU,))
    chance = random.Random(0)
    due = [chance.random() * REPORT_SECONDS for _ in sessions]
    start = time.monotonic()
    while not ended.wait(0.02):
        for place, session in enumerate(sessions):
            if time.monotonic() - start >= due[place]:
                due[place] += REPORT_SECONDS
                if reports.is_set():
                    told = NodeReport(
                        usage=usage, phase="computing", waiting_part=chance.random(), sent_bytes_per_second=1e8,
                        received_bytes_per_second=1e8, round_trip_seconds=0.002, lines=(LINE,),
                    )  # fmt: skip
                    session.report(told)
    for session, connection in zip(sessions, connections, strict=True):
        session.close()
        connection.close()


if __name__ == "__main__":
    main()
