"""Writes what each test and fixture of a run took to a file: wall seconds and processor seconds by phase.

`--durations-file FILE` names it; `tools/durations.py FILE` shows the slowest, the sums per folder and what is over its
budget. With pytest-xdist the workers hand their part over with the reports, so there is one file and one writer.

Processor seconds are those of the test's process and of the children it waited for, user and system: what a test costs
on a machine whose cores are busy, where its wall seconds say little.
"""

import json
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TIMES = "durations"  # the key under which a report carries what this plugin measured


def processor_seconds() -> float:
    """Of this process and of its children that have ended and been waited for."""
    every = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in every)


class Clock:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), processor_seconds()

    def read(self) -> dict[str, float]:
        wall, cpu = time.perf_counter() - self._wall, processor_seconds() - self._cpu
        return {"wall_seconds": round(wall, 4), "cpu_seconds": round(cpu, 4)}


class Recorder:
    """Runs where tests run: measures, and hangs the figures on the reports."""

    def __init__(self) -> None:
        self._phase: Clock | None = None
        self._fixtures: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        clock = Clock()
        try:
            return (yield)
        finally:
            self._fixtures.append({"fixture": fixturedef.argname, "scope": fixturedef.scope, **clock.read()})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._phase, self._fixtures = Clock(), []
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._phase, self._fixtures = Clock(), []
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._phase, self._fixtures = Clock(), []
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if self._phase is not None:
            figures = {"phase": report.when, **self._phase.read(), "fixtures": self._fixtures}
            report.user_properties = [*report.user_properties, (TIMES, figures)]
        return report


class Writer:
    """Runs once: gathers the reports, from this process or from its workers, and writes the file at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._started = time.time()
        self._clock = Clock()
        self._rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, figures in report.user_properties:
            if name == TIMES and figures["phase"] == report.when:
                worker = getattr(report, "worker_id", "")
                self._rows.append({"test": report.nodeid, "outcome": report.outcome, "worker": worker, **figures})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {"started": self._started, **self._clock.read(), "rows": self._rows}
        self._file.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", default=None, help="write what each test and fixture took to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(), "durations-recorder")
    file = config.getoption("--durations-file")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(file)), "durations-writer")
