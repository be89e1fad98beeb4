"""The dashboard in a real browser: it follows a crew, shows hostile text as text, and needs its token.

Some run directories are of a real practice crew. Those that no crew would write are written by hand (tests/watched.py).
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.monitor.web.page import save_page
from cuadrilla.rundir import RunDir, append_event, write_json
from tests.chromium import Browser, Tab
from tests.commands import coordinator, joined, make_run, reached, start, stop, wait_for
from tests.dashboards import TOKEN, ShownDashboard, shown
from tests.watched import WrittenCrew, add_rows, hold_lock, rows_of

TOLD = "document.body?.dataset.told === 'yes'"
LEFT = """[...document.querySelectorAll('.events tbody tr')]
    .some(({ innerText }) => innerText.includes('left') && innerText.includes('worker-2'))"""
BOTH = "data.crew.filter((machine) => machine.here && machine.works).length === 2"
HOSTILE = "<img src=x onerror='window.owned = 1'><script>window.owned = 1</script>&lt;b&gt;"
TABS = ("crew", "train", "runs", "samples", "logs", "about")


@pytest.fixture
def crew(tmp_path: Path) -> WrittenCrew:
    """A run that has ended, with rows of a machine, and a second run beside it."""
    other = WrittenCrew(folder=tmp_path / "otra", speeds={"ana": 1.0}, rounds=90).write()
    write_json(other.config, {"values": {"optim": {"lr": 0.5, "kind": "muon"}}})
    made = WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 3.0, "luis": 1.0}, rounds=120)
    run = made.write()
    facts = {"time": made.began, "kind": "hello", "facts": {"device": "cpu", "system": "Debian"}}
    rows = [made.usage("ana", made.began + 5 * step, step=step) for step in range(20)]
    log = [
        {"time": made.began + n, "kind": "log", "level": ("info", "warning")[n % 2], "text": f"line {n}"}
        for n in range(6)
    ]
    add_rows(rows_of(run, "ana"), [facts, *rows, *log])
    append_event(run.events, "evicted", worker="luis", reason="the connection ended")
    append_event(run.events, "units skipped", units=[7])
    write_json(run.config, {"values": {"optim": {"lr": 0.02, "kind": "muon"}}, "num_steps": 120})
    return made


@pytest.fixture
def dashboard(crew: WrittenCrew) -> Iterator[ShownDashboard]:
    with shown(crew.folder.parent) as found:
        yield found


def texts(tab: Tab, selector: str) -> list[str]:
    found: list[str] = tab.value(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText.trim())"
    )
    return found


def go(tab: Tab, name: str) -> None:
    tab.click(f"#tab-{name}")
    tab.until(f"!document.getElementById('{name}').hidden")


def test_a_run_that_has_ended(tab: Tab, dashboard: ShownDashboard) -> None:
    tab.open(dashboard.link)
    tab.until(TOLD)
    assert tab.value("location.href") == f"{dashboard.url}/#/train"  # the token is out of the address
    tab.choose("#run", "casa")
    go(tab, "crew")
    tab.until("document.title.startsWith('casa') && document.querySelectorAll('.machines .name').length === 2")
    assert texts(tab, ".machines .name") == ["ana", "luis"]
    assert tab.text("#state") == "complete"
    assert "1 " in tab.text("#figures") or "120" in tab.text("#figures")
    tab.click(".machines .name")
    tab.until("document.querySelector('.machines .alone') !== null")
    assert "Debian" in tab.text(".machines .alone")
    assert tab.value("document.querySelector('.spark polyline').getAttribute('points').split(' ').length") == 20
    go(tab, "train")
    tab.until("document.querySelectorAll('#train canvas').length === 5")
    events = [text.split("\t")[-1] for text in texts(tab, ".events tbody tr")]
    assert events[0] == "1 unit of the data was skipped: nobody could compute it."
    assert events[1] == "luis was sent away (the connection ended)."
    tab.value("document.getElementById('smoothing').value = 0.9")
    tab.choose("#axis", "elapsed")
    assert texts(tab, "#train .chart:first-child .u-label")[:3] == ["training time", "loss", "loss, smoothed"]
    assert tab.value("charts.loss.plot.data[0].at(-1)") == pytest.approx(120 * 0.4)
    assert tab.value("charts.shares.plot.data[0].at(-1)") == pytest.approx(120 * 0.4)
    go(tab, "samples")
    assert "(120)" in tab.text("#samples blockquote")
    tab.value(
        "(() => { const s = document.getElementById('sample'); s.value = 0; s.dispatchEvent(new Event('input')); })()"
    )
    assert "(40)" in tab.text("#samples blockquote")
    go(tab, "logs")
    assert len(texts(tab, ".log tbody tr")) == 6
    tab.choose("#level", "warnings")
    assert len(texts(tab, ".log tbody tr")) == 3
    tab.click("#contains")
    tab.type("LINE 5")
    assert [text.split("\t")[-1] for text in texts(tab, ".log tbody tr")] == ["line 5"]


def test_two_runs_are_compared(tab: Tab, dashboard: ShownDashboard) -> None:
    tab.open(dashboard.link)
    tab.until(TOLD)
    go(tab, "runs")
    tab.until("document.querySelectorAll('#runs .list tbody tr').length === 2")
    for number in (1, 2):
        tab.click(f"#runs .list tbody tr:nth-child({number}) input")
        tab.until(f"chosen.size === {number} && curves.size === {number}")
    tab.until("document.querySelectorAll('#runs canvas').length === 3")
    assert texts(tab, ".differences tbody td") == ["optim.lr", "0.02", "0.5"]
    assert sorted(texts(tab, "#runs .chart:first-child .u-label"))[:2] == ["casa", "otra"]
    tab.value("[...document.querySelectorAll('#runs .list button')].find((one) => one.textContent === 'otra').click()")
    tab.until("document.title.startsWith('otra')")


def test_a_crew_that_trains_loses_a_worker(tab: Tab, tmp_path: Path) -> None:
    """The page shows by itself new steps, the killed worker, and that the other worker has all of the work then."""
    run = make_run(tmp_path / "run", unhurried=True)
    with start(run, "--practice", "1.0,0.5") as crew, shown(run.path) as dashboard:
        try:
            wait_for(joined(run, 2), crew)
            tab.open(dashboard.link)
            go(tab, "crew")
            tab.until(BOTH)
            tab.until("document.getElementById('state').innerText === 'running'")  # drawn later than the data arrive
            before = tab.value("data.head.version ?? 0")
            tab.until(f"data.head.version > {before}")
            next(child for child in coordinator(crew).children() if "worker-2" in child.cmdline()).kill()
            tab.until("document.querySelector('.machines tr.gone .name')?.innerText.trim() === 'worker-2'")
            assert "worker-1" in texts(tab, ".machines tbody tr:not(.gone) .name")
            go(tab, "train")
            tab.until(LEFT)
            after = tab.value("data.head.version")
            tab.until(f"data.head.version > {after}")
            tab.until("data.crew.find((machine) => machine.name === 'worker-1').share === 1")
        finally:
            stop(crew)
        tab.until("document.getElementById('state').innerText === 'stopped'")


def test_it_is_stopped_and_noted_of(tab: Tab, tmp_path: Path) -> None:
    """A real training is stopped; the page asks before."""
    run = make_run(tmp_path / "run", steps=10**6, unhurried=True)
    with start(run) as process, shown(run.path) as dashboard:
        try:
            wait_for(reached(run, 5), process)
            tab.open(dashboard.link)
            tab.until("!document.getElementById('stop').hidden")
            assert "1,000,000" in tab.text("#figures")
            go(tab, "about")
            tab.click("#notes")
            tab.type(HOSTILE)
            tab.click("#note")
            tab.until("document.getElementById('note').hidden")
            assert run.notes.read_text() == HOSTILE
            tab.value("window.confirm = (text) => { window.asked = text; return false; }")
            tab.click("#stop")
            assert "run" in tab.value("asked")
            tab.value("window.confirm = () => true")
            tab.click("#stop")
            process.wait(timeout=60)
        finally:
            stop(process)
        tab.until("document.getElementById('state').innerText === 'stopped' && document.getElementById('stop').hidden")
        assert "the same command goes on" in tab.text("#why")


def test_nothing_that_a_run_holds_becomes_html(tab: Tab, tmp_path: Path) -> None:
    crew = WrittenCrew(folder=tmp_path / HOSTILE.replace("/", "_"), speeds={HOSTILE: 1.0, "__proto__": 1.0}, rounds=50)
    run = crew.write()
    add_rows(run.metrics, [crew.row(51) | {"sample": HOSTILE, "constructor": 1}])
    add_rows(run.events, [{"time": 1.0, "event": HOSTILE, "worker": HOSTILE, HOSTILE: HOSTILE}])
    append_event(run.events, "left", worker=HOSTILE, reason=HOSTILE)
    rows = [{"time": time.time(), "kind": "hello", "facts": {HOSTILE: HOSTILE}}, crew.usage("x", time.time(), step=1)]
    line = {"time": time.time(), "kind": "log", "level": "error", "text": HOSTILE}
    gpus = [{"index": 0, "name": HOSTILE, "busy_percent": 50.0}]
    add_rows(rows_of(run, "constructor"), [rows[0], rows[1] | {"gpus": gpus}, line])
    with shown(tmp_path) as dashboard:
        tab.open(dashboard.link)
        tab.until(TOLD)
        go(tab, "crew")
        assert HOSTILE in texts(tab, ".machines .name")
        for number in (0, 1, 2):
            tab.value(f"document.querySelectorAll('.machines .name')[{number}].click()")
        for name in TABS:
            go(tab, name)
        assert tab.value("document.querySelector('#samples blockquote').textContent") == HOSTILE
        assert HOSTILE in tab.value("document.querySelector('.events tbody').textContent")
        assert HOSTILE in tab.value("document.querySelector('.log tbody').textContent")
        assert tab.value("document.querySelectorAll('img, main script, main iframe').length") == 0
        assert tab.value("window.owned") is None


def test_who_has_no_token_is_asked_for_it(tab: Tab, dashboard: ShownDashboard) -> None:
    tab.open(dashboard.url)
    assert tab.value("document.getElementById('key').hidden") is False
    assert "casa" not in tab.text("body")
    tab.click("#secret")
    tab.type("wrong")
    tab.press("Enter")
    tab.until("document.getElementById('trouble').innerText.includes('wrong')")
    tab.value("location.hash = '#token=wrong-too'")  # another link, pasted into the same tab
    tab.until("location.hash === '#/train' && !document.getElementById('key').hidden")
    tab.click("#secret")
    tab.type(dashboard.link)  # the whole link, as it is copied from a terminal
    tab.press("Enter")
    tab.until(TOLD)
    assert tab.value("document.getElementById('key').hidden") is True
    tab.call("Page.reload")
    tab.until(TOLD)  # the token is kept as long as the tab is open
    tab.value(f"token = ''; current = null; data = fresh(); location.hash = '#token={TOKEN}'")
    tab.until("data.head.name")


def test_by_keyboard_and_in_both_languages(tab: Tab, dashboard: ShownDashboard, crew: WrittenCrew) -> None:
    left_out = "unusually large loss or gradient: this update is skipped, and training continues"
    line = {"time": crew.began + 9, "kind": "log", "level": "info", "text": f"step 3: {left_out} (loss 5)"}
    add_rows(rows_of(crew.run, "ana"), [line])
    tab.open(dashboard.link, languages="es-ES,es;q=0.9")
    tab.until(TOLD)
    assert texts(tab, ".events tbody td:last-child")[1] == "luis quedó fuera (la conexión terminó)."
    assert (tab.value("document.documentElement.lang"), tab.text("#tab-crew")) == ("es", "Cuadrilla")
    go(tab, "logs")
    assert texts(tab, ".log tbody tr td:last-child")[0].startswith("paso 3: pérdida o gradiente")
    go(tab, "crew")
    for name in (*TABS[1:], "crew", "train"):
        tab.press("ArrowRight")
        assert tab.value("document.activeElement.id") == f"tab-{name}"
        assert tab.value(f"document.getElementById('{name}').hidden") is False
    assert tab.value("document.querySelectorAll('[role=tab][tabindex=\"0\"]').length") == 1
    assert "Pérdida" in tab.text("#train .chart h3")
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
    tab.value("document.querySelector('.skip').focus()")
    assert tab.value("document.querySelector('.skip').getBoundingClientRect().left") >= 0
    tab.press("Enter")
    assert tab.value("document.activeElement.id") == "main"
    tab.click("#language")
    assert (tab.value("document.documentElement.lang"), tab.text("#tab-crew")) == ("en", "Crew")
    assert "Loss" in tab.text("#train .chart h3")


def test_a_page_that_was_saved(browser: Browser, crew: WrittenCrew, tmp_path: Path) -> None:
    """It draws its data, shows hostile text as text, sends no requests, and lacks the parts of a live page."""
    add_rows(crew.run.metrics, [crew.row(121) | {"sample": HOSTILE, "lr_factor": 0.5, "val_bits_per_byte_error": 0.1}])
    page = tmp_path / "page.html"
    save_page(crew.run, page)
    with browser.tab() as tab:
        tab.open(page.as_uri())
        tab.until(TOLD)
        assert texts(tab, "[role=tab]:not([hidden])") == ["Crew", "Run", "Samples", "Logs", "Details"]
        go(tab, "crew")
        assert texts(tab, ".machines .name") == ["ana", "luis"]
        assert tab.text("#run option:checked") == "casa"
        go(tab, "train")
        tab.until("document.querySelectorAll('#train canvas').length === 6")  # the learning rate, too
        go(tab, "samples")
        assert tab.value("document.querySelector('#samples blockquote').textContent") == HOSTILE
        tab.click("#language")
        assert tab.text("#tab-about") == "Detalles"
        assert tab.value("window.owned") is None
        assert (tab.complaints, [url for url in tab.asked if not url.startswith(("data:", page.as_uri()))]) == ([], [])


def test_it_fits_a_phone(tab: Tab, dashboard: ShownDashboard) -> None:
    tab.resize(400, 800, phone=True)
    tab.open(dashboard.link)
    tab.until(TOLD)
    for name in TABS:
        go(tab, name)
        assert tab.value("document.documentElement.scrollWidth") <= 400, name


def test_a_run_that_begins_is_shown_by_itself(tab: Tab, tmp_path: Path) -> None:
    with shown(tmp_path) as dashboard:
        tab.open(dashboard.link)
        tab.until("document.getElementById('trouble').innerText.includes('no run')")
        run = WrittenCrew(folder=tmp_path / "nueva", speeds={"ana": 1.0}, rounds=3, state="running").write()
        hold_lock(RunDir(run.path))
        tab.until("document.title.startsWith('nueva') && document.getElementById('state').innerText === 'running'")
        assert tab.text("#trouble") == ""
