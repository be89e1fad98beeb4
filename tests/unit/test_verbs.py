"""The root command: each verb alone, or all of them."""

import os
import subprocess
import sys

import pytest
from typer.main import get_command

from cuadrilla.cli.app import command_line, run
from cuadrilla.cli.verbs import INSTEAD, VERBS

MAX_LETTERS = 64


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_of_another_program_names_the_command(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cuadrilla", word])
    assert (run(), INSTEAD[word].split()[0] in VERBS) == (2, True)
    assert f"hint: cuadrilla {INSTEAD[word]}\n" in capsys.readouterr().err


def test_the_list_knows_the_commands_without_importing_them() -> None:
    commands = get_command(command_line([])).commands
    assert {name for name, command in commands.items() if command.hidden} == {"work"}
    assert list(commands) == list(VERBS)
    assert all(len(command.help or "") <= MAX_LETTERS for command in commands.values())
    code = "import sys; from cuadrilla.cli.app import run; sys.argv[1:] = ['--help']; run(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {f"cuadrilla.cli.{verb.module}" for verb in VERBS.values()} & set(loaded)


@pytest.mark.parametrize(
    ("line", "found"), [("cuadrilla tra", "train"), ("cuadrilla train --allow", "--allow-changes")]
)
def test_a_shell_completes_commands_and_their_options(line: str, found: str) -> None:
    asked = {"_CUADRILLA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    code = "import sys; sys.argv[0] = 'cuadrilla'; from cuadrilla.cli.app import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert found in done.stdout.split()
