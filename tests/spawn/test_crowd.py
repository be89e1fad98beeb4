"""A hundred worker processes on this machine. With `-s` it shows the time of a round and of the coordinator in it."""

import time
from pathlib import Path

import psutil
import pytest

from cuadrilla.rundir import last_rows
from tests.commands import coordinator, make_run, newest_version, reached, start, stop, wait_for

WORKERS, ROUNDS = 100, 20


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.skipif(
    psutil.virtual_memory().available < 21 * 2**30, reason="needs 21 GB: torch has 0.13 in each process"
)
def test_a_hundred_workers_train_together(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    crew = start(run, "--practice", ",".join(["1.0"] * WORKERS), "--set", f"train.batch_sequences={WORKERS * 64}")
    wait_for(
        lambda: last_rows(run.metrics)[-1:] and last_rows(run.metrics)[-1]["workers"] == WORKERS, crew, seconds=999
    )
    lead = coordinator(crew)
    begun, cpu, since = newest_version(run), sum(lead.cpu_times()[:2]), time.monotonic()
    wait_for(reached(run, begun + ROUNDS), crew, seconds=999, every_seconds=0.2)
    seconds, cpu = time.monotonic() - since, sum(lead.cpu_times()[:2]) - cpu
    print(f"{ROUNDS} rounds {seconds:.1f} s, coordinator {cpu:.1f} s, {lead.memory_info().rss / 2**20:.0f} MB")
    rows = last_rows(run.metrics)[begun - 1 :]
    worked = set().union(*(row["shares"] for row in rows))
    print(f"{min(row['workers'] for row in rows)} to {max(row['workers'] for row in rows)} of {len(worked)} in a round")
    assert len(worked) == WORKERS  # each in some round, since a slow one may get no share
    assert [row["tokens"] for row in rows] == [rows[0]["tokens"] * row["version"] // begun for row in rows]
    stop(crew)
