"""Texts for users: messages and errors, the choice of the language, help in Spanish, texts without a translation."""

import errno
import gettext
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cuadrilla import messages
from cuadrilla.cli import data, output
from cuadrilla.cli.app import command_line, run
from cuadrilla.cli.output import options, report_error, say
from cuadrilla.cli.verbs import VERBS
from cuadrilla.data.formats.files import ACCEPTED
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.messages import (
    ENGLISH,
    SPANISH,
    THAT_TRAVEL,
    VARIABLES,
    Message,
    language,
    recognised,
    shown,
    translated,
)

MAX_LETTERS = 64
HOSTILE = "{0} {path} {path.__class__} {{x}} %s {"
KIND = "{kind}: {share:.1%} of {size:,}"


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {
        KIND: "el {share:.1%} de {size:,}: {kind}",
        "a book": "un libro",
        "read {what}": "lee {what}",
        "{path} is bad": "{path} está mal",
        "look at {path}": "mira {path}",
    }
    translations = gettext.NullTranslations()
    monkeypatch.setattr(translations, "gettext", lambda text: found.get(text, text))
    monkeypatch.setattr(
        messages, "catalogue", lambda reads: translations if reads == SPANISH else gettext.NullTranslations()
    )
    return found


@pytest.fixture
def spanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", SPANISH)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", os.environ.get("LANGUAGE", ""))
    monkeypatch.setenv("COLUMNS", "400")
    for name in ("json", "debug"):
        monkeypatch.setattr(options, name, False)


@pytest.mark.usefixtures("catalogue")
def test_spanish_has_its_own_order_and_numbers() -> None:
    made = Message(KIND, kind=Message("a book"), share=0.1234, size=1234567)
    assert made == "a book: 12.3% of 1,234,567"
    assert made.in_language(SPANISH) == "el 12,3% de 1.234.567: un libro"
    assert Message("read {what}", what=1234.5).in_language(SPANISH) == "lee 1234.5"
    assert Message("no {x:.1f}", x=1.5).in_language(SPANISH) == "no 1,5", "a template that has no translation"


@pytest.mark.usefixtures("catalogue")
def test_a_message_in_a_message_is_translated_and_a_plain_text_is_not() -> None:
    made = Message("read {what}", what=Message("read {what}", what=Message("a book")))
    assert made.in_language(SPANISH) == "lee lee un libro"
    assert Message("read {what}", what="a book").in_language(SPANISH) == "lee a book"
    assert Message(made) is made


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize("reads", [ENGLISH, SPANISH])
def test_braces_from_outside_are_never_a_template(reads: str) -> None:
    assert shown(HOSTILE, reads) == HOSTILE
    assert Message(HOSTILE).in_language(reads) == HOSTILE
    assert HOSTILE in Message("{path} is bad", path=HOSTILE).in_language(reads)
    twice = Message("read {what}", what=Message("{reason}", reason=HOSTILE))
    assert twice.in_language(reads).endswith(HOSTILE)


@pytest.mark.usefixtures("catalogue")
def test_an_error_is_made_of_its_messages() -> None:
    error = DataError("{path} is bad", path=Path("a"), hint="look at {path}")
    assert (error.message, error.hint, str(error)) == ("a is bad", "look at a", "a is bad")
    assert (error.message.template, dict(error.message.fields)) == ("{path} is bad", {"path": "a"})
    assert (error.hint.template, dict(error.hint.fields)) == ("look at {path}", {"path": "a"})
    assert error.__notes__ == ["hint: look at a"]
    again = ConfigError(error.message, hint=error.hint)
    assert again.message.in_language(SPANISH) == "a está mal"
    assert again.hint.in_language(SPANISH) == "mira a"


@pytest.mark.parametrize(
    ("said", "expected"),
    [("es_ES.UTF-8", SPANISH), ("fr:es:en", SPANISH), ("en_GB", ENGLISH), ("de_DE", ENGLISH), ("", ENGLISH)],
)
def test_the_language_of_a_system(said: str, expected: str) -> None:
    assert language({VARIABLES[0]: said}) == expected


def test_the_first_variable_that_is_set_decides() -> None:
    assert language({}) == ENGLISH
    for position, name in enumerate(VARIABLES):
        later = dict.fromkeys(VARIABLES[position + 1 :], "en_GB.UTF-8")
        assert language({**dict.fromkeys(VARIABLES[:position], ""), name: "es_MX.UTF-8", **later}) == SPANISH


def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of `cuadrilla ARGUMENTS` and its output, reduced to words with one blank between them."""
    monkeypatch.setattr(sys, "argv", ["cuadrilla", *arguments])
    code = run()
    printed = capsys.readouterr()
    return code, words(printed.out + printed.err)


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("**", "").split())


@pytest.mark.parametrize(
    "arguments",
    [("--lang", "es", "monitor", "nada"), ("monitor", "--lang=es", "nada"), ("monitor", "nada", "--lang", "es")],
)
def test_the_language_may_be_chosen_anywhere(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = called(monkeypatch, capsys, *arguments)
    assert (code, os.environ["LANGUAGE"]) == (2, SPANISH)
    assert "consejo: " in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("doctor a b c", "sobra: b c"),
        ("serve r --precision x", "'--precision': debe ser uno de 'auto', 'fp32', 'bf16', 'fp16'"),
        ("train --steps x", "'--steps': debe ser un número entero"),
    ],
)
def test_what_was_typed_wrongly_in_spanish(
    arguments: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, capsys, *arguments.split(), "--lang=es")[1].startswith(f"error: {says} consejo:")


@pytest.mark.parametrize("path", [("train",), ("data", "prepare"), ("export", "gguf")])
def test_the_help_of_a_command_in_spanish(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make messages` checks that each line of help has a translation."""
    command: Any = get_command(command_line(path))
    for name in path:
        command = command.commands[name]
    code, said = called(monkeypatch, capsys, *path, "--lang=es", "--help")
    assert code == 0
    for text in (inspect.cleandoc(part.help) for part in (command, *command.params) if getattr(part, "help", None)):
        spanish = translated(text, SPANISH)
        assert spanish != text
        assert words(spanish) in said
        assert words(text) not in said


def test_the_panels_and_lines_of_the_list_in_spanish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = called(monkeypatch, capsys, "--help", "--lang", "es")[1]
    assert said.startswith("Uso: cuadrilla [OPCIONES] ORDEN [ARGUMENTOS]...")
    assert all(f"─ {name} ─" in said for name in ("Empezar", "Cuadrilla", "Datos", "Modelos", "Mirar"))
    assert all(len(translated(verb.help, SPANISH)) <= MAX_LETTERS for verb in VERBS.values())


def test_help_names_what_the_code_does() -> None:
    """The template must be a literal, so that it gets into the catalogue."""
    assert f"({ACCEPTED})" in data.SOURCES_HELP


@pytest.mark.usefixtures("catalogue", "spanish")
def test_an_error_in_spanish(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = DataError("{path} is bad", path="a\nb", hint="look at {path}")
    report_error(error)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: a\\nb está mal\n\nhint: mira a\\nb\n"
    monkeypatch.setattr(options, "json", True)
    report_error(error)
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "error": "a\nb is bad",
        "hint": "look at a\nb",
        "exit_code": 4,
        "template": "{path} is bad",
        "fields": {"path": "a\nb"},
    }
    assert "está mal" in said.err


@pytest.mark.usefixtures("spanish")
def test_what_is_said_in_spanish(capsys: pytest.CaptureFixture[str]) -> None:
    say("error: {message}", message=HOSTILE)
    say("interrupted")
    say(HOSTILE)
    output.emit("{text}", text="Data")  # a model's word, not a panel's title
    said = capsys.readouterr()
    assert said.err == f"error: {HOSTILE}\ninterrumpido\n{HOSTILE}\n"
    assert said.out == "Data\n"


def test_common_reasons_of_the_system_are_translated() -> None:
    error = ConfigError("cannot read {path}: {reason}", path="x", reason=os.strerror(errno.ENOENT))
    assert error.message == "cannot read x: No such file or directory"
    assert error.message.in_language(SPANISH) == "no se puede leer x: no existe ese archivo o carpeta"
    assert shown("no such thing", SPANISH) == "no such thing"


def test_a_text_that_has_travelled_is_recognised() -> None:
    how = "each machine makes 8 steps by itself before a merge, because over this network that is faster"
    said = recognised(f"from step 43 on: {how}", SPANISH)
    assert said.startswith("desde el paso 43: cada máquina da 8 pasos")
    assert recognised("vm-2 left: it was kicked", SPANISH) == "vm-2 se ha ido: fue despedida"
    assert shown(Message("the run was stopped by Ctrl-C"), SPANISH) == "Ctrl-C paró el entrenamiento"
    assert recognised("they said: {x} %s", SPANISH) == "they said: {x} %s"
    assert recognised("a: " * 400 + "b", SPANISH) == "a: " * 400 + "b"  # a line of a stranger's log
    *templates, plain = THAT_TRAVEL
    assert plain == "%s: %s"
    assert all(translated(template, SPANISH) != template for template in templates), "it is said nowhere any more"
