"""The page of the queue in a real browser: runs that a real process hands out to a machine that has joined.

One run has a name that contains HTML. It is endless until it is stopped, so the machine's speed does not matter.
"""

import json
from pathlib import Path

from cuadrilla.home import Home
from tests.browser.test_dashboard import HOSTILE, TOLD, go, texts
from tests.chromium import Tab
from tests.commands import wait_for
from tests.dashboards import shown
from tests.machines import Machine, invite, language_run

NAME = HOSTILE.replace("/", "_")


def test_a_queue_that_is_handed_out(
    tab: Tab, coordinator: Machine, ana: Machine, stories: Path, tmp_path: Path
) -> None:
    """The page follows the machines of a queue, and its runs beside them. Names stay text."""
    folder = tmp_path / "shown"
    folder.mkdir()
    language_run(folder / NAME, stories)
    language_run(folder / "dos", stories, steps=40)
    (folder / "queue.txt").write_text(f"{NAME}\ndos\n")
    work = coordinator.start("queue", str(folder / "queue.txt"), "--listen", "127.0.0.1:0", "--not-here")
    wait_for(lambda: Home(coordinator.home).open_file.exists(), work)
    with shown(folder) as dashboard:
        tab.open(dashboard.link)
        tab.until(TOLD)
        tab.choose("#run", "queue.crew")
        tab.until("document.getElementById('state').innerText === 'running'")
        working = ana.start("join", "--name", "ana", says=invite(coordinator))
        go(tab, "crew")
        tab.until("document.querySelectorAll('#crew .machines .name').length === 1")
        assert texts(tab, "#crew .machines .name") == ["ana"]
        tab.until("data.crew[0].usage?.cpu_percent >= 0")
        tab.until("document.querySelector('#crew .machines .job')?.innerText.startsWith('img-src-x')")
        tab.choose("#run", NAME)
        go(tab, "train")
        tab.until(f"document.title.startsWith({json.dumps(NAME)}) && data.head.version > 0")
        tab.until("document.querySelectorAll('#train canvas').length > 0")
        tab.choose("#run", "queue.crew")
        (folder / "queue.txt").write_text("dos\n")
        assert work.wait(timeout=60) == 0
        assert working.wait(timeout=60) == 0
        tab.until("document.getElementById('state').innerText === 'complete'")
        go(tab, "crew")
        tab.until("document.querySelector('#crew .machines tr.gone .name').innerText.trim() === 'ana'")
        go(tab, "train")
        tab.until("document.querySelector('#train .events').innerText.includes('ana has trained dos-')")
        go(tab, "runs")
        tab.until(
            "runs.every(({ key, state }) => state === (key === 'queue.crew' || key === 'dos' ? 'complete' : 'stopped'))"
        )
        assert tab.value("document.querySelectorAll('img, main script, main iframe').length") == 0
        assert tab.value("window.owned") is None
