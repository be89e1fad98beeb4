"""The report in a real browser: it draws, shows hostile text as text, and says nothing on the console."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cuadrilla.monitor.report import read_report, render
from cuadrilla.rundir import RunDir, append_event
from cuadrilla.train.sinks import JsonlSink

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=5000",
    "--dump-dom",
)  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    run = RunDir(tmp_path)
    sink = JsonlSink(run.metrics)
    for name in ("ana", "luis"):
        append_event(run.events, "joined", worker=name)
    for version in range(1, 41):
        shares = {"ana": 0.75, "luis": 0.25}
        more = {"val_loss": 2.0, "val_bits_per_byte": 1.0, "sample": "<b>hola</b>"} if version % 10 == 0 else {}
        sink.log(version, {"tokens": version, "loss": 3.0, "tokens_per_second": 9.0, "shares": shares, **more})
    sink.close()
    append_event(run.events, "left", worker="luis", reason="<img src=x onerror=alert(1)>")
    path = tmp_path / "report.html"
    path.write_text(render(read_report(run)), encoding="utf-8")
    return path


def test_the_page_draws_itself(page: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    dom = done.stdout
    assert 'data-ready="yes"' in dom
    assert len(re.findall(r"<canvas", dom)) == 6  # loss, bits per byte, tokens/s, shares, gradient norm, learning rate
    assert "&lt;b&gt;hola&lt;/b&gt;</blockquote>" in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom
    assert "CONSOLE" not in done.stderr
