"""Which documents the rules drop, and why."""

import os
import re
from pathlib import Path

import pytest

from cuadrilla.data.cuentos import stories
from cuadrilla.data.filters import BOOKS, FILTERS, NONE, WEB, reason_to_drop

pytestmark = pytest.mark.unit

PAGE = """El ayuntamiento aprobó ayer el nuevo plan de la ciudad, que prevé más árboles en las calles del centro.
La concejala explicó que se plantarán en otoño, y que los vecinos podrán elegir entre varias especies.
Según el informe, con una inversión de dos millones se reduce el calor de las plazas en verano.
Los comerciantes, en cambio, temen por las obras: dicen que a su calle no llegará nadie durante un año.
"""
SENTENCE = "La misma frase aparece una y otra vez en la página, que no dice nada más. "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PAGE, None),
        (PAGE.replace(".\n", "\n"), "lines_without_punctuation"),
        (PAGE * 3, "repeated_lines"),
        (" ".join(SENTENCE for _ in range(12)), "repeated_words"),
        ("Hola.", "few_words"),
        (
            "The council approved the new plan of the city, which will bring more trees to the streets of the centre. "
            "They will be planted in autumn, and neighbours may choose among several kinds of them. " * 2,
            "language",
        ),
        (PAGE + " ".join(f"{n} - {n * 7};" for n in range(20)) + ".", "few_letters"),
        (re.sub(r"((\S+ ){5})", r"\1\n", PAGE), "many_lines"),
    ],
)
def test_pages_of_the_web(text, reason):
    assert reason_to_drop(text, WEB) == reason
    assert reason_to_drop(text, NONE) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PAGE, None),
        ("Hola.", None),
        ("«¡Ay!»\n—¿Qué?\n—¡Ay!\n—Nada.", None),
        ("Call me Ishmael. Some years ago, never mind how long precisely.", None),
        ("\n".join(f"Verso {n} del poema\n¡ay, mi amor!" for n in range(50)), None),
        ("В начале было слово, и слово было у Бога.", None),
        ("太初有道，道与神同在，道就是神。" * 30, None),
        ("\n".join(f"{n} {n * n} {n * 3.14:.2f}" for n in range(500)), "few_letters"),
        ("x" * 5000, "word_length"),
        ("a b c d e f " * 100, "word_length"),
        (PAGE * 3, "repeated_lines"),
    ],
)
def test_books_keep_all_that_is_language(text, reason):
    assert reason_to_drop(text, BOOKS) == reason


def test_the_built_in_stories_pass():
    assert [story for story in stories(300, seed=0) if reason_to_drop(story, BOOKS)] == []


def test_passages_that_come_twice_count_once_and_by_their_characters():
    """The limit for 5 words in a row is 14.5 % of the characters, and a passage has one first time."""
    words = [f"voz{number}" for number in range(400)]
    text = " ".join(word if number % 2 else f"de {word}" for number, word in enumerate(words))
    passage = " ".join(f"eco{number}" for number in range(30))
    for copies, reason in ((1, None), (2, None), (6, "repeated_words")):
        assert reason_to_drop(f"{text} de la {passage}. " + f"Una {passage}. " * (copies - 1), WEB) == reason


def test_every_filter_has_a_name():
    assert FILTERS == {"books": BOOKS, "web": WEB, "none": NONE}


def test_no_chapter_of_a_novel_is_dropped_as_a_book():
    root = os.environ.get("CUADRILLA_TEST_DATA")
    if not root:
        pytest.skip("CUADRILLA_TEST_DATA is not set: a folder with quijote-pg2000-latin1.txt and novelas/")
    quijote = (Path(root) / "quijote-pg2000-latin1.txt").read_text(encoding="latin-1")
    novels = [path.read_text(encoding="utf-8") for path in sorted((Path(root) / "novelas").glob("*.txt"))[::4]]
    for text in (quijote, *novels):
        for start in range(0, len(text), 10_000):
            assert reason_to_drop(text[start : start + 10_000], BOOKS) is None
