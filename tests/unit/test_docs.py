"""Commands, options and `--set` keys in the documentation exist, and both languages have the same commands."""

import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import click
import pytest
import typer.main

from cuadrilla.cli.app import command_line
from cuadrilla.config import Config
from tools.guide_lines import FENCE

ROOT = Path(__file__).parents[2]
OLDER = "older-guides.md"
"""This page quotes the commands of other guides."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")])
TRANSLATED = {ROOT / "README.md": ROOT / "README.es.md"} | {
    ROOT / "docs" / page.name: page for page in sorted((ROOT / "docs/es").glob("*.md"))
}
SHELLS = ("bash", "sh", "powershell", "console")
CALL = re.compile(r"(?:^|[\s(;&|\"'])(?:cuadrilla|-m cuadrilla)\s+(?=[a-z-])(.*)")


def shell_lines(text: str) -> Iterator[str]:
    inside, held = "", ""
    for line in text.splitlines():
        if fence := FENCE.match(line):
            inside = "" if inside else fence[1] or "text"
        elif inside in SHELLS:
            if line.rstrip().endswith(("\\", "`")):
                held += line.rstrip()[:-1] + " "
                continue
            yield held + line
            held = ""


def calls(text: str) -> Iterator[list[str]]:
    """The arguments of each call of the command."""
    for line in shell_lines(text):
        if found := CALL.search(line.partition(" #")[0]):
            yield words_of(re.split(r"\s+(?:&&|\|\|?|;|2?>>?|<)", found[1])[0])


def mentioned(text: str) -> Iterator[list[str]]:
    """The calls inside sentences; `up|join` stands for two."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`cuadrilla ([a-z-][^`]*)`", " ".join(prose.split())):
        yield from map(list, product(*(word.split("|") for word in words_of(span))))


def words_of(text: str) -> list[str]:
    """The words of a call, which may end with the quote of an outer command."""
    for end in ("", '"', "'"):
        try:
            return shlex.split(text.removesuffix(end) if end else text)
        except ValueError:
            continue
    raise AssertionError(f"no command: {text}")


def wrong_with(arguments: list[str]) -> str:
    """Why the command would refuse these arguments; "" if it accepts them."""
    command: click.Command = typer.main.get_command(command_line(arguments))  # type: ignore[assignment]
    words = [word for word in arguments if word not in ("--json", "--debug")]
    if words[:1] == ["--lang"]:
        words = words[2:]
    while isinstance(getattr(command, "commands", None), dict) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:  # type: ignore[attr-defined]
            return f"no command {words[0]}"
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    for place, word in enumerate(words):
        if word == "--":
            break
        if word.startswith("--") and word.partition("=")[0] not in known:
            return f"no option {word}"
        if word == "--set" and (wrong := wrong_key(words[place + 1])):
            return wrong
    return ""


def wrong_key(text: str) -> str:
    """Why the key of `section.key=value` does not exist, in any kind of its section; "" if it does."""
    section, _, key = text.partition("=")[0].partition(".")
    field = Config.model_fields.get(section)
    if field is None:
        return f"no section {section}"
    kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    known = {name for kind in kinds for name in getattr(kind, "model_fields", {})}
    return "" if all(each in known for each in re.split(r"\+\w+\.", key)) else f"no key {section}.{key}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != OLDER], ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = {" ".join(call): wrong_with(call) for call in (*calls(text), *mentioned(text))}
    assert {call: wrong for call, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(("page", "other"), TRANSLATED.items(), ids=lambda page: page.name)
def test_both_languages_say_the_same_commands(page: Path, other: Path) -> None:
    """Only the name of a folder of texts differs."""
    english, spanish = (path.read_text(encoding="utf-8").replace("textos/", "texts/") for path in (page, other))
    assert list(calls(english)) == list(calls(spanish))
    assert re.findall(r"^make \w+", english, re.M) == re.findall(r"^make \w+", spanish, re.M)


def test_a_commit_is_checked_by_the_ruff_of_make_check() -> None:
    used = re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [f"ruff=={version}" in (ROOT / "constraints.txt").read_text().split() for version in used] == [True]
