"""All commands of the README and of the pages that it begins with, run in order in an empty folder. After commands that
train, the results are checked as a reader would.

The demonstration is shortened here; `make soak` runs all of it.
"""

import hashlib
import json
import os
import re
import shlex
import ssl
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trustme

from cuadrilla.cli import demo
from cuadrilla.cli.demo import SETTINGS, STEPS
from cuadrilla.data import cuentos
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.runfile import make_run, run_file_text
from tests.commands import COMMAND, begin, events, run_program
from tests.inside import cuadrilla
from tests.web import serving, whole

ROOT = Path(__file__).parents[2]
SMALLER = {"tokens": "1024", "batch_sequences": "4"}  # instead of runs of hours
SHORT_DEMO = ("--steps", "24")
SHORTER = {"20m": "4s", "200": "8", "500": "12"}
PAGES = ("README.md", "docs/data.md", "docs/train.md", "docs/crew.md")


def commands(pages: Sequence[str]) -> list[list[str]]:
    """The lines of the ```bash blocks, without comments."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def typed(arguments: list[str], folder: Path, *, says: str = "", home: str = "this", **variables: str) -> str:
    """Run a command, which must succeed, and return its stdout."""
    done = cuadrilla(*arguments, cwd=folder, says=says, env=environment(folder, home) | variables)
    assert done.returncode == 0, f"cuadrilla {arguments}: {done.stderr}"
    return done.stdout


def environment(folder: Path, home: str) -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "CUADRILLA_HOME": str(folder / "homes" / home)}


def get(arguments: list[str], folder: Path) -> str:
    """A stand-in for Project Gutenberg, behind a proxy and with the real host's name in its certificate."""
    text = "\r\n".join(cuentos.stories(300)).encode("iso-8859-1", "replace")
    authority, certificate = trustme.CA(), folder / "authority.pem"
    authority.cert_pem.write_to_path(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("www.gutenberg.org").configure_cert(context)
    with serving(context) as server:
        server.on("/cache/epub/2000/pg2000.txt", whole(text))
        proxy = {"https_proxy": server.url(""), "SSL_CERT_FILE": str(certificate)}
        return typed(arguments, folder, **proxy)


def up_and_join(run: str, folder: Path) -> None:
    """Coordinate on the loopback, since the machine may have no other network. There is no worker beside the
    coordinator, so that the run does not end before the other machine has joined."""
    words = ("up", run, "--listen", "127.0.0.1:0", "--set", "engine.workers=[]")
    coordinator = begin(*words, cwd=folder, stdout=subprocess.PIPE, env=environment(folder, "this"))
    assert coordinator.stdout is not None
    typed(["join"], folder, says=coordinator.stdout.readline(), home="another")
    assert coordinator.wait(timeout=150) == 0
    coordinator.communicate()


def shrink(run_file: Path) -> None:
    text = run_file.read_text(encoding="utf-8")
    for key, value in SMALLER.items():
        text = re.sub(rf"^(# )?{key} = [\d_]+", f"{key} = {value}", text, flags=re.MULTILINE)
    text = text.replace("[sample]\n", "[evaluate]\nsequences = 8\n[sample]\ntokens = 8\n")
    run_file.write_text(text, encoding="utf-8")


class Reader:
    """Checks the results of a command, as a reader of the README would. There is a method for some verbs; the other
    commands only have to succeed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def look(self, arguments: list[str], said: str) -> None:
        both = "_".join(["after", *arguments[:2]])
        looked = getattr(self, both, None) or getattr(self, f"after_{arguments[0]}", None)
        if looked is not None:
            looked(arguments, said)

    def after_demo(self, _arguments: list[str], said: str) -> None:
        found, run = json.loads(said)[0]["measures"], RunDir(self.folder / "demo")
        assert list(found)[1:] == ["built-in stories", "minimal pairs"]
        assert [row["version"] for row in last_rows(run.metrics)] == list(range(1, 25))
        assert found[next(iter(found))]["bits_per_byte"] < 1.3  # 2.1 before the third step; 1.0 is usual
        assert [row["worker"] for row in events(run, "left")] == ["worker-3"]  # killed on purpose
        assert (self.folder / "demo" / "report.html").stat().st_size > 10_000

    def after_data_get(self, _arguments: list[str], _said: str) -> None:
        folder = self.folder / "textos" / "quijote"
        record = json.loads((folder / "SOURCE.json").read_text())
        assert record["url"].endswith("pg2000.txt")
        sha256 = hashlib.sha256((folder / "quijote.txt").read_bytes()).hexdigest()
        assert record["files"] == {"quijote.txt": sha256}

    def after_new(self, arguments: list[str], _said: str) -> None:
        run_file = self.folder / arguments[1] / "run.toml"
        assert "# " in run_file.read_text(encoding="utf-8")
        shrink(run_file)

    def after_train(self, arguments: list[str], _said: str) -> None:
        run = RunDir(self.folder / (arguments[1] if "--time" not in arguments else "novelas-gpt2"))
        assert json.loads(run.status.read_text())["state"] == "complete"
        rows = last_rows(run.metrics)
        if "--time" in arguments:
            assert rows[-1]["val_bits_per_byte"] < 2.5
            return
        assert rows[-1]["tokens"] == int(SMALLER["tokens"])
        joined = {row["worker"] for row in events(run, "joined")}
        assert len(joined) == (3 if "--practice" in arguments else 1)

    def after_up(self, arguments: list[str], _said: str) -> None:
        run = RunDir(self.folder / arguments[1])
        assert json.loads(run.status.read_text())["state"] == "complete"
        assert len(events(run, "joined")) == 1
        assert not (self.folder / "homes" / "another" / "crew").exists()


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("measured_soon")
def test_the_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_STORIES", 8)  # instead of 200 and 500
    monkeypatch.setattr(demo, "NUM_PAIRS", 12)
    (tmp_path / "novelas").mkdir()
    for number in range(3):
        text = "\n\n".join(cuentos.stories(200, start=1000 * (number + 1)))
        (tmp_path / "novelas" / f"{number}.md").write_text(text, encoding="utf-8")
    reader, verbs = Reader(tmp_path), set[str]()
    act: dict[str, Callable[[list[str]], str | None]] = {
        "demo": lambda _: typed(["--json", "demo", *SHORT_DEMO], tmp_path),
        "data get": lambda arguments: get(arguments, tmp_path),
        "up": lambda arguments: up_and_join(arguments[1], tmp_path),
        "generate": lambda words: typed([*words, "--tokens", "16"], tmp_path),
        "join": lambda _: "",  # done with `up`, since both take part in one run
    }
    for line in commands(PAGES):
        match line:
            case ["make", "demo"]:
                arguments = ["demo"]
            case ["make", "check" | "test" | "test-all"] | [".", ".venv/bin/activate"]:
                continue
            case ["cuadrilla", *arguments]:
                arguments = [SHORTER.get(word, word) for word in arguments]
            case _:
                pytest.fail(f"the README shows a command that no test runs: {line}")
        do = act.get(" ".join(arguments[:2])) or act.get(arguments[0]) or (lambda words: typed(words, tmp_path))
        said = do(arguments)
        if arguments[0] != "join":
            reader.look(arguments, said or "")
        verbs.add(arguments[0])
    expected = {"generate", "eval", "doctor", "data", "new", "train", "dashboard", "up", "join", "export", "import"}
    assert verbs == expected | {"demo"}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_demonstration_teaches(tmp_path: Path) -> None:
    """The smallest size, as on a slow machine. It is in the run file, so this machine's speed does not decide."""
    run = RunDir(tmp_path / "demo")
    make_run(run.path, run_file_text({**SETTINGS, "train.steps": STEPS}))
    done = run_program(*COMMAND, "--json", "demo", cwd=tmp_path, env=environment(tmp_path, "this"), seconds=1500)
    found = json.loads(done.stdout)[0]["measures"]
    assert [row["version"] for row in last_rows(run.metrics)] == list(range(1, STEPS + 1))
    assert found["built-in stories"]["stories_right"] >= 0.9
    assert found["minimal pairs"]["pairs_right"] >= 0.95
