"""`cuadrilla dashboard` as a process: its link, its end, its token."""

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import begin
from tests.watched import WrittenCrew

TOKEN = "correct-horse-battery-staple"


@contextmanager
def serving(*arguments: object) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process, and the first line that it prints."""
    with begin("dashboard", *arguments, "--port", "0", stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
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
        with get(f"{url}/api/follow?of=casa", token) as stream:  # an open stream does not delay its end
            assert stream.readline().startswith(b"data:")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=9) == 0
        assert process.stderr is not None
        assert token not in process.stderr.read()


def test_a_token_of_ones_own_is_not_printed(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text(TOKEN + "\n")
    with serving(run, "--token-file", file) as (_, link):
        assert TOKEN not in link
        with get(f"{link.partition('/#')[0]}/metrics", TOKEN) as answer:
            assert b'cuadrilla_versions_total{run="casa"} 5.0' in answer.read()
