"""How fast the dashboard opens a long run of a large crew in Chromium, and how much memory that takes.

    python -m bench.dashboard [--workers 100] [--rounds 10000]

Writes the run directory that a crew of `--workers` machines leaves, starts `cuadrilla dashboard` on it, and opens its
page in a browser with an empty profile. Reported are the seconds until the curves are on the page, and until each
machine has its row; the JavaScript heap of the page, the private memory of its process and the memory of the dashboard.
Then one row is added to the metrics: the bytes that the dashboard reads for it, and the seconds until the page has it.
"""

import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.common import options, report
from tests.chromium import Browser, Tab
from tests.commands import COMMAND
from tests.watched import WrittenCrew, add_rows, rows_of

DRAWN = (
    "data.figures.x.length && data.shares.columns.size === {workers} && data.crew.length === {workers} && "
    "document.querySelectorAll('#train canvas').length >= 4"
)
SHOWN = "document.querySelectorAll('.machines tbody tr').length === {workers}"


def write(folder: Path, *, workers: int, rounds: int) -> WrittenCrew:
    speeds = {f"maquina-{number:03d}": 1 + number % 7 for number in range(workers)}
    crew = WrittenCrew(folder=folder, speeds=speeds, rounds=rounds)
    run = crew.write()
    for name in speeds:
        add_rows(rows_of(run, name), [crew.usage(name, crew.began + 5 * step, step=step) for step in range(1200)])
    return crew


def opened(tab: Tab, link: str, *, workers: int) -> dict[str, float]:
    began = time.perf_counter()
    tab.open(link)
    tab.until(DRAWN.format(workers=workers))
    curves = time.perf_counter() - began
    tab.value("openTab('crew')")
    tab.until(SHOWN.format(workers=workers))
    crew = time.perf_counter() - began
    heap = tab.call("Runtime.getHeapUsage")
    return {"crew_seconds": crew, "curves_seconds": curves, "heap_mb": heap["usedSize"] / 1e6}


def renderers() -> float:
    """Private memory of the largest renderer process of Chromium, in MB."""
    found = [0.0]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if "--type=renderer" in child.cmdline():
                found.append(child.memory_full_info().uss / 1e6)
    return max(found)


def main() -> None:
    given = options(__doc__, workers=100, rounds=10_000, opens=3)
    with tempfile.TemporaryDirectory() as name:
        crew = write(Path(name, "run"), workers=given.workers, rounds=given.rounds)
        report("dashboard", **vars(given), **measure(crew, Path(name), workers=given.workers, opens=given.opens))


def measure(crew: WrittenCrew, place: Path, *, workers: int, opens: int) -> dict[str, Any]:
    command = [*COMMAND, "dashboard", str(crew.folder), "--port", "0"]
    files = sum(path.stat().st_size for path in crew.folder.rglob("*.jsonl"))
    found: dict[str, Any] = {"files_mb": files / 1e6, "opened": []}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        link = server.stdout.readline().strip()
        process = psutil.Process(server.pid)
        try:
            with Browser(place / "profile") as browser:
                for _ in range(opens):
                    with browser.tab() as tab:
                        figures = opened(tab, link, workers=workers)
                        memory = {"page_mb": renderers(), "dashboard_mb": process.memory_info().rss / 1e6}
                        found["opened"].append(figures | memory)
                with browser.tab() as tab:
                    opened(tab, link, workers=workers)
                    found["followed"] = followed(tab, crew, process)
        finally:
            server.terminate()
    return found


def followed(tab: Tab, crew: WrittenCrew, process: psutil.Process) -> dict[str, float]:
    """Add one row: the bytes that the dashboard reads for it, and the seconds until it is on the page."""
    before = process.io_counters().read_chars
    began = time.perf_counter()
    row = crew.row(crew.rounds + 1)
    add_rows(crew.run.metrics, [row])
    tab.until(f"data.head.version === {crew.rounds + 1}")
    seconds = time.perf_counter() - began
    return {
        "row_bytes": len(json.dumps(row)),
        "read_bytes": process.io_counters().read_chars - before,
        "row_seconds": seconds,
    }


if __name__ == "__main__":
    main()
