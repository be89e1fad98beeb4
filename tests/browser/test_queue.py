"""The page of the queue in a real browser: runs that a real process hands out to a machine that has joined.

One run has a name that contains HTML. It is endless until it is stopped, so the machine's speed does not matter.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.home import Home
from tests.browser.test_dashboard import HOSTILE, TOLD, go, texts
from tests.chromium import Tab
from tests.commands import wait_for
from tests.dashboards import ShownDashboard, shown
from tests.machines import Machine, invite, language_run
from tests.searches import WrittenSearch
from tests.watched import WrittenCrew

NAME = HOSTILE.replace("/", "_")
STEP = "data.jobs[0].step"
ROWS = "document.querySelectorAll('#crew .jobs tbody tr').length"
FIRST_STATE = "document.querySelector('#crew .jobs tbody .badge')?.innerText"


@pytest.fixture
def work(coordinator: Machine, stories: Path, tmp_path: Path) -> "subprocess.Popen[str]":
    """A process that hands out an endless run and a run of forty steps."""
    for run in (language_run(tmp_path / NAME, stories), language_run(tmp_path / "dos", stories, steps=40)):
        coordinator.run("queue", "add", str(run.path), code=0)
    process = coordinator.start("queue", "work", "--listen", "127.0.0.1:0", "--not-here", "--until-empty")
    wait_for(lambda: Home(coordinator.home).open_file.exists(), process)
    return process


def test_a_queue_that_is_handed_out(
    tab: Tab, coordinator: Machine, ana: Machine, work: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """The page follows the queue by itself, from the first machine until all runs have ended. Names stay text."""
    WrittenCrew(folder=tmp_path / "shown" / "otra", speeds={"luis": 1.0}, rounds=5).write()
    with shown(tmp_path / "shown", queue=Home(coordinator.home).queue) as dashboard:
        tab.open(dashboard.link)
        tab.until(TOLD)
        tab.choose("#run", "queue")
        tab.until(f"{ROWS} === 2 && document.getElementById('state').innerText === 'running'")
        assert texts(tab, "#crew .jobs .first") == [NAME, "dos"]
        assert texts(tab, "#crew .jobs .badge") == ["waiting", "waiting"]
        working = ana.start("join", "--name", "ana", says=invite(coordinator))
        tab.until(f"{FIRST_STATE} === 'running' && {STEP} > 0")
        before = tab.value(STEP)
        tab.value("document.querySelector('#crew .jobs button').focus()")
        tab.until(f"{STEP} > {before}")
        assert tab.value("document.activeElement.textContent") == NAME, "a row that is drawn again keeps the keyboard"
        tab.until("document.querySelector('#crew .machines .job')?.innerText.length > 0")
        assert texts(tab, "#crew .machines .name") == ["ana"]
        assert NAME in tab.text("#crew .machines .job")
        tab.until("data.crew[0].usage?.cpu_percent >= 0")
        tab.press("Enter")
        tab.until(f"tab === 'train' && document.title.startsWith({json.dumps(NAME)})")
        tab.until("document.querySelectorAll('#train canvas').length > 0")
        assert tab.value("document.activeElement.id") == "tab-train"
        go(tab, "crew")
        tab.choose("#run", "queue")
        assert coordinator.run("queue", "stop", str(tmp_path / NAME)).returncode == 0
        tab.until(f"{FIRST_STATE} === 'stopped'")
        tab.until("data.jobs.every(({ state }) => ['stopped', 'complete'].includes(state))")
        assert work.wait(timeout=60) == 0
        assert working.wait(timeout=60) == 0
        tab.until("document.getElementById('state').innerText !== 'running'")
        assert "2 / 2" in tab.text("#figures")
        assert "40 / 40" in texts(tab, "#crew .jobs tbody tr")[1]
        assert tab.value("document.querySelector('#crew .machines tr.gone .name').innerText.trim()") == "ana"
        assert tab.value("document.querySelectorAll('img, main script, main iframe').length") == 0
        assert tab.value("window.owned") is None


@pytest.fixture
def search(tmp_path: Path) -> Iterator[ShownDashboard]:
    """The dashboard of a run that has a search."""
    WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 1.0}, rounds=5).write()
    WrittenSearch(run=tmp_path / "casa", num_trials=8).write(until=6)
    with shown(tmp_path / "casa") as dashboard:
        yield dashboard


def test_a_search_beside_its_run(tab: Tab, search: ShownDashboard) -> None:
    """The page is in Spanish. A trial has its own curves, although it is not in the list of runs."""
    tab.open(search.link, languages="es-ES,es;q=0.9")
    tab.until(TOLD)
    tab.choose("#run", "casa/tune")
    tab.until(f"{ROWS} === 7")
    assert "6 / 7" in tab.text("#figures")
    heads = texts(tab, "#crew .jobs th")
    assert heads == ["trabajo", "estado", "máquina", "paso", "puntuación", "ajustes", "motivo"]
    rows = texts(tab, "#crew .jobs tbody tr")
    assert "the loss is not finite" in rows[3]
    assert "90 / 90" in rows[0]
    tab.click("#crew .jobs tbody tr:nth-child(2) button")
    tab.until("document.title.startsWith('t0001') && tab === 'train'")
    assert tab.value("document.getElementById('run').value") == "casa/tune/t0001"
    tab.value("lookForRuns()")
    assert tab.value("current") == "casa/tune/t0001", "it stays, although the list does not have it"
    tab.choose("#run", "casa")
    tab.until("document.title.startsWith('casa')")
