"""The root command: each verb alone, or all of them."""

import pytest
from typer.main import get_command

from cuadrilla.cli.app import HIDDEN, VERBS, command_line

pytestmark = pytest.mark.unit


def verbs(*arguments: str) -> set[str]:
    return set(get_command(command_line(arguments)).commands)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_is_called_comes_alone(verb: str) -> None:
    assert verbs("--supervised", "3", "--json", verb, "--help") == {verb}


@pytest.mark.parametrize("arguments", [(), ("--help",), ("trian",), ("trian", "train")])
def test_all_verbs_otherwise(arguments: tuple[str, ...]) -> None:
    assert verbs(*arguments) == set(VERBS)


def test_what_is_hidden_is_hidden() -> None:
    commands = get_command(command_line([])).commands
    assert {name for name, command in commands.items() if command.hidden} == HIDDEN
