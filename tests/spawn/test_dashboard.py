"""`cuadrilla dashboard` as a process: its link, its end, where it may listen; a real Prometheus that scrapes it."""

import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import COMMAND, joined, make_run, reached, start, stop, wait_for
from tests.inside import cuadrilla
from tests.watched import WrittenCrew

pytestmark = pytest.mark.spawn

PROMETHEUS = shutil.which("prometheus")
TOKEN = "correct-horse-battery-staple"


@contextmanager
def serving(*arguments: object) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process, and what it has printed."""
    command = [*COMMAND, "dashboard", *map(str, arguments), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(timeout=60)


def get(url: str, token: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    return urllib.request.urlopen(request, timeout=60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 1.0}, rounds=5).write().path


def test_its_link_opens_it_and_a_signal_ends_it(run: Path) -> None:
    with serving(run.parent) as (process, link):
        url, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/#token=([\w-]{40,})", link).groups()  # type: ignore[union-attr]
        with get(f"{url}/api/runs", token) as answer:
            assert [row["key"] for row in json.load(answer)["runs"]] == ["casa"]
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            get(f"{url}/api/runs", "wrong")
        refused.value.close()
        assert token not in " ".join(psutil.Process(process.pid).cmdline())
        here = psutil.Process(process.pid)
        listening = [each.laddr.ip for each in here.net_connections() if each.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]
        assert not any("torch" in Path(each.path).name for each in here.memory_maps())
        with get(f"{url}/api/follow?of=casa", token) as stream:  # one that is open does not hold it up
            assert stream.readline().startswith(b"data:")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=9) == 0
        assert process.stderr is not None
        assert token not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--host", "192.0.2.7"], 5, "can be reached by others"),
        (["--host", "0.0.0.0"], 5, "neither a machine's name"),
        (["--token-file", "missing.txt"], 2, "missing.txt"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    done = cuadrilla("dashboard", *arguments, cwd=tmp_path)
    assert (done.returncode, message in done.stderr, "hint:" in done.stderr) == (code, True, True), done.stderr


def test_a_token_of_ones_own_is_not_printed(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text(TOKEN + "\n")
    with serving(run, "--token-file", file) as (_, link):
        assert TOKEN not in link
        with get(f"{link.partition('/#')[0]}/metrics", TOKEN) as answer:
            assert b'cuadrilla_versions_total{run="casa"} 5.0' in answer.read()


CONFIG = """
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: cuadrilla
    authorization:
      credentials_file: {token}
    static_configs:
      - targets: ["{target}"]
"""


@pytest.mark.thorough
@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed: apt install prometheus")
def test_prometheus_scrapes_a_crew_and_grafanas_queries_return_series(tmp_path: Path, port: int) -> None:
    run = make_run(tmp_path / "casa")
    token = tmp_path / "token.txt"
    token.write_text(TOKEN + "\n")
    with start(run, "--practice", "1.0,0.5") as crew, serving(run.path, "--token-file", token) as (_, link):
        try:
            wait_for(joined(run, 2), crew)
            wait_for(reached(run, 5), crew)
            target = urllib.parse.urlsplit(link).netloc
            (tmp_path / "prometheus.yml").write_text(CONFIG.format(token=token, target=target))
            with prometheus(tmp_path, port) as query:
                wait_for(lambda: len(query('up{job="cuadrilla"} == 1')) == 1)
                wait_for(lambda: len(query("cuadrilla_node_up == 1")) == 3, seconds=60)  # the coordinator's is one
                wait_for(
                    lambda: (
                        {each["metric"]["node"] for each in query("cuadrilla_node_share > 0")}
                        == {"worker-1", "worker-2"}
                    )
                )
                wait_for(lambda: len(query("rate(cuadrilla_tokens_total[10s]) > 0")) == 1)
                for asked in grafana_queries():
                    if "gpu" not in asked and "held_out" not in asked and "node_temperature" not in asked:
                        wait_for(lambda asked=asked: query(asked) != [], seconds=60)
        finally:
            stop(crew)


def grafana_queries() -> list[str]:
    """Of all panels, for all runs."""
    text = (resources.files("cuadrilla.monitor") / "grafana/dashboards/cuadrilla.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    return [target["expr"].replace("$run", ".*") for panel in panels for target in panel["targets"]]


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[Any]:
    """A real one; what is yielded gives the series of a query."""
    command = [
        str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip

    def query(expression: str) -> list[dict[str, Any]]:
        words = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}", timeout=60) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.URLError:  # it starts
            return []

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield query
        finally:
            process.terminate()
            process.wait(timeout=60)
