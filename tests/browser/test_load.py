"""The page of a load test in a real browser: it draws, shows hostile text as text, and says nothing on the console."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.serve.load import LoadPlan, LoadRun
from cuadrilla.serve.load_asks import Asking
from cuadrilla.serve.load_client import LoadTarget
from cuadrilla.serve.load_report import render_load, result
from cuadrilla.serve.load_stats import LoadReply, LoadStage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=5000",
    "--dump-dom",
)  # fmt: skip
HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")


def stage_at(rate: float) -> LoadStage:
    stage = LoadStage(mode="open", rate=rate, end=100.0, complete=True)
    for number in range(100):
        at = float(number)
        stage.take(
            LoadReply(
                scheduled=at, sent=at, first=at + 0.1, last=at + 0.2, ended=at + 0.2, chunks=2, chunks_inside=2,
                tokens=2, by_usage=True, gaps=[0.1],
            )
        )  # fmt: skip
    stage.take(LoadReply(scheduled=1.0, sent=1.0, ended=2.0, problem="status 500", detail=HOSTILE))
    return stage


def drawn(found: dict[str, Any], tmp_path: Path) -> str:
    page = tmp_path / "load.html"
    page.write_text(render_load(found), encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert 'data-ready="yes"' in done.stdout
    assert "CONSOLE" not in done.stderr
    return done.stdout


@pytest.mark.parametrize(("rates", "charts"), [((8.0, 4.0), 5 + 2), ((), 0)])
def test_the_page_draws_itself(rates: tuple[float, ...], charts: int, tmp_path: Path) -> None:
    """Of two stages: five plots over both, two of the one that is chosen; of none: a page without plots."""
    asking = Asking(model=HOSTILE)
    plan = LoadPlan(target=LoadTarget(url="http://127.0.0.1:1"), asking=asking, is_sweep=True)
    run = LoadRun(asking=asking, stages=[stage_at(rate) for rate in rates], is_complete=bool(rates))
    dom = drawn(json.loads(json.dumps(result(plan, run, options={"model": HOSTILE}))), tmp_path)
    assert len(re.findall(r"<canvas", dom)) == charts
    assert dom.count("&lt;img src=x onerror=alert(1)&gt;") >= 1 + 2 * bool(rates)
    assert "<img" not in dom.partition('<script id="report"')[0]
    assert ("The test was interrupted" in dom.partition("<script")[0]) != bool(rates)
