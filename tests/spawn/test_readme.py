"""Every command of both READMEs, run in order in an empty folder, the demonstration and its quality included."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cuadrilla.data import cuentos
from tests.authority import Authority
from tests.web import serving, whole

ROOT = Path(__file__).parents[2]
SMALLER = {"tokens": "4096", "batch_sequences": "2", "unit_sequences": "1"}  # for runs that would take hours here


def commands(readme: str) -> list[list[str]]:
    """The lines of the ```bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def cuadrilla(
    arguments: list[str], folder: Path, *, timeout: int, says: str = "", home: str = "this", **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "CUADRILLA_HOME": str(folder / "homes" / home), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "cuadrilla", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=timeout, check=False, env=environment, input=says,
    )  # fmt: skip
    assert done.returncode == 0, f"cuadrilla {arguments}: {done.stderr}"
    return done


def get(arguments: list[str], folder: Path, *, text: bytes) -> None:
    """From a stand-in of Project Gutenberg, behind a proxy and with the real host's name in its certificate."""
    authority = Authority("www.gutenberg.org")
    certificate = authority.write(folder / "authority.pem")
    with serving(authority.server()) as server:
        server.on("/cache/epub/2000/pg2000.txt", whole(text))
        proxy = {"https_proxy": server.url(""), "SSL_CERT_FILE": str(certificate)}
        cuadrilla(["data", "get", *arguments], folder, timeout=60, **proxy)


def up(run: str, folder: Path) -> "subprocess.Popen[str]":
    """On the loopback, since a machine for tests may have no other network; without a worker of its own, so that the
    run does not end before the other machine is there."""
    return subprocess.Popen(
        [sys.executable, "-m", "cuadrilla", "up", run, "--listen", "127.0.0.1:0", "--set", "engine.workers=[]"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "CUADRILLA_HOME": str(folder / "homes" / "this")},
    )  # fmt: skip


def test_both_readmes_show_the_same_commands() -> None:
    assert commands("README.md") == commands("README.es.md")


@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    quijote = "\r\n".join(cuentos.stories(300)).encode("iso-8859-1", "replace")
    (tmp_path / "novelas").mkdir()
    for number in range(3):
        text = "\n\n".join(cuentos.stories(200, start=1000 * (number + 1)))
        (tmp_path / "novelas" / f"{number}.md").write_text(text, encoding="utf-8")
    verbs: set[str] = set()
    coordinator: subprocess.Popen[str] | None = None
    for line in commands("README.md"):
        match line:
            case ["make", "demo"]:
                result = json.loads(cuadrilla(["--json", "demo"], tmp_path, timeout=1500).stdout)
                assert result["stories_right"] >= 0.9
                assert result["pairs_right"] >= 0.95
            case ["make", "check" | "test"] | [".", ".venv/bin/activate"]:
                continue
            case ["cuadrilla", "data", "get", *arguments]:
                get(arguments, tmp_path, text=quijote)
            case ["cuadrilla", "up", run]:
                coordinator = up(run, tmp_path)
            case ["cuadrilla", "join"]:
                assert coordinator is not None
                text = coordinator.stdout.readline()  # type: ignore[union-attr]
                cuadrilla(["join"], tmp_path, timeout=200, says=text, home="another")
                assert coordinator.wait(timeout=60) == 0
                coordinator.communicate()
                verbs.update({"up", "join"})
            case ["cuadrilla", verb, *arguments]:
                verbs.add(verb)
                cuadrilla([verb, *arguments], tmp_path, timeout=300)
                if verb == "new":
                    shrink(tmp_path / arguments[0] / "run.toml")
            case _:
                pytest.fail(f"the README shows a command that no test runs: {line}")
    expected = {"generate", "eval", "devices", "data", "new", "train", "report", "up", "join", "export", "import"}
    assert verbs == expected


def shrink(run_file: Path) -> None:
    text = run_file.read_text(encoding="utf-8")
    for key, value in SMALLER.items():
        text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.MULTILINE)
    run_file.write_text(text, encoding="utf-8")
