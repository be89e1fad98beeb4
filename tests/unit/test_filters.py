"""Which documents the rules drop, and why."""

import pytest

from cuadrilla.data.clean import reason_to_drop
from cuadrilla.data.cuentos import stories

PAGE = """El ayuntamiento aprobó ayer el nuevo plan de la ciudad, que prevé más árboles en las calles del centro.
La concejala explicó que se plantarán en otoño, y que los vecinos podrán elegir entre varias especies.
Según el informe, con una inversión de dos millones se reduce el calor de las plazas en verano.
Los comerciantes, en cambio, temen por las obras: dicen que a su calle no llegará nadie durante un año.
"""


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
    assert reason_to_drop(text) == reason


def test_the_built_in_stories_pass():
    assert [story for story in stories(300, seed=0) if reason_to_drop(story)] == []
