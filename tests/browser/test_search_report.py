"""The page of a search in a real browser: it draws, filters and sorts, shows hostile text as text, asks nobody."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.monitor.search_report import read_search, render_search
from cuadrilla.tune.folder import SearchFolder
from tests.chromium import CHROMIUM, Browser, Tab
from tests.searches import SPACE, WrittenSearch

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium"),
]

HOSTILE = "<img src=x onerror='window.owned = 1'><script>window.owned = 1</script>&lt;b&gt;"
LINES = "[...document.querySelectorAll('#parallel .lines path')]"
ROWS = "[...document.querySelectorAll('#trials tbody tr')]"
SEEN = f"{LINES}.filter((line) => !line.classList.contains('off')).length"
SEEN_ROWS = f"{ROWS}.filter((row) => !row.hidden).length"


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """Says nothing on its console, asks for nothing but the page, and runs no script from data."""
    with browser.tab() as made:
        yield made
        assert made.complaints == []
        assert all(url.startswith("file:") and url.endswith("report.html") for url in made.asked)
        assert made.value("window.owned") is None


def open_page(tab: Tab, folder: SearchFolder) -> None:
    folder.report.write_text(render_search(read_search(folder)), encoding="utf-8")
    tab.open(folder.report.as_uri())
    tab.until("document.body.dataset.ready === 'yes'")


@pytest.fixture
def search(tmp_path: Path) -> WrittenSearch:
    return WrittenSearch(run=tmp_path / "casa", section={"constraints": {"parameters": {"at_most": 2e6}}})


def test_the_page_draws_itself(tab: Tab, search: WrittenSearch) -> None:
    open_page(tab, search.write())
    assert tab.value(f"{LINES}.length") == tab.value(f"{ROWS}.length") == 30
    assert tab.value("document.querySelectorAll('#parallel [role=slider]').length") == 2 * (len(SPACE) + 1)
    assert tab.value("document.querySelectorAll('#scatter svg').length") == len(SPACE)
    assert tab.value("document.querySelectorAll('#progress canvas').length") == 2
    assert "cuadrilla train casa/tune/best" in tab.text("#commands")
    missed = [row for row in read_search(search.folder).trials if row.missed]
    assert tab.value(f"{LINES}.filter((line) => line.classList.contains('missed')).length") == len(missed) > 0


def test_a_setting_that_does_not_count_leaves_a_gap(tab: Tab, search: WrittenSearch) -> None:
    """Each trial lacks one of two settings: its line is in two pieces, or three where it has no score."""
    open_page(tab, search.write())
    pieces = tab.value(f"{LINES}.map((line) => line.getAttribute('d').split('M').length - 1)")
    assert set(pieces) == {2}


def test_an_axis_filters_by_mouse_and_by_keyboard(tab: Tab, search: WrittenSearch) -> None:
    open_page(tab, search.write())
    tab.value("document.querySelector('#parallel [role=slider]').focus()")  # the lower end of optim.kind: muon, adamw
    tab.press("ArrowRight")
    adamw = sum(row.values["optim.kind"] == "adamw" for row in read_search(search.folder).trials)
    assert tab.value(SEEN) == tab.value(SEEN_ROWS) == adamw
    assert tab.text("#parallel output") == f"{adamw} of 30 trials"
    tab.press("Escape")
    assert tab.value(SEEN) == tab.value(SEEN_ROWS) == 30
    tab.value("document.querySelector('#parallel').scrollIntoView()")
    left, top, height = tab.value(
        "(() => { const box = document.querySelectorAll('#parallel .hit')[1].getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y, box.height]; })()"
    )
    for kind, part in (("mousePressed", 0.4), ("mouseMoved", 0.1), ("mouseReleased", 0.1)):
        where = {"x": left, "y": top + part * height, "button": "left", "buttons": 1, "clickCount": 1}
        tab.call("Input.dispatchMouseEvent", type=kind, **where)
    kept = [row for row in read_search(search.folder).trials if float(row.values["optim.lr"]) > 0.01]
    assert 0 < tab.value(SEEN) == tab.value(SEEN_ROWS) <= len(kept)
    tab.click("#parallel button")
    assert tab.value(SEEN) == 30


def test_the_table_sorts(tab: Tab, search: WrittenSearch) -> None:
    open_page(tab, search.write())
    column = f"{ROWS}.map((row) => row.cells[1].textContent).filter((text) => text).map(Number)"
    for order in ("ascending", "descending"):
        tab.click("#trials th:nth-child(2) button")
        assert tab.value("document.querySelector('#trials th:nth-child(2)').getAttribute('aria-sort')") == order
        scores = tab.value(column)
        assert scores == sorted(scores, reverse=order == "descending")
        assert tab.value(f"{ROWS}.at(-1).cells[1].textContent") == ""


def test_another_rung_can_be_looked_at(tab: Tab, search: WrittenSearch) -> None:
    open_page(tab, search.write())
    tab.choose("#parallel select", "1")
    promoted = sum(row.rung == 1 for row in read_search(search.folder).trials)
    assert tab.value(f"{LINES}.length") == promoted
    tab.choose("#parallel select", "-1")
    assert tab.value(f"{LINES}.length") == 30


def test_one_trial_is_shown_too(tab: Tab, search: WrittenSearch) -> None:
    """A line between no two points is none: a single value must be drawn as a dot."""
    search.num_trials, search.rungs = 1, 1
    search.section = {"space": {"optim.lr": SPACE["optim.lr"]}}
    folder = search.write()
    rows = folder.trials.read_text().replace('"optim.kind": "muon", ', "")
    folder.trials.write_text(rows)
    open_page(tab, folder)
    assert tab.value(f"{LINES}.length") == 1
    drawn = "(() => { const canvas = document.querySelector('#progress canvas'); const { width, height } = canvas;"
    drawn += "const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);"
    drawn += "return data.some((red, at) => at % 4 === 0 && red > 190 && data[at + 1] < 100 && data[at + 2] < 60); })()"
    assert tab.until(drawn)
    assert "Too few trials" in tab.text("#importance")


def test_hostile_text_is_text(tab: Tab, search: WrittenSearch) -> None:
    folder = search.write(until=12)
    said = {"trial": 90, "rung": 0, "place": HOSTILE}
    with open(folder.trials, "a") as file:
        for row in (
            {"event": "begun", "values": {"optim.kind": HOSTILE, HOSTILE: HOSTILE, "x.y": 3}, **said},
            {"event": "ended", "score": None, "reason": HOSTILE, **said},
        ):
            file.write(json.dumps(row) + "\n")
    open_page(tab, folder)
    assert HOSTILE in tab.text("#trials table")
    assert tab.value("document.querySelectorAll('img, main script').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_a_page_that_is_too_wide(tab: Tab, search: WrittenSearch, scheme: str) -> None:
    tab.colours(scheme)
    tab.resize(400, 800, phone=True)
    open_page(tab, search.write())
    assert tab.value("document.documentElement.scrollWidth") <= 400
    assert tab.value("document.querySelector('#trials .scroll').scrollWidth") > 400
    tab.value("document.querySelector('#trials .scroll').scrollLeft = 300")
    assert tab.value("document.querySelector('#trials td').getBoundingClientRect().left") >= 0  # the names stay
