"""Text for a terminal: letters of all kinds stay as they are, and control characters are replaced."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.printable import one_line, printable

KEPT = [
    "",
    "¿Qué tal, señor Ñandú? —Así así… «pingüino» 12 % · 3 €\n\tvale",
    "🙂 👩‍🌾 ❤️ 🇪🇸 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f 👍🏽 1️⃣",
    "日本語 العربية עברית हिन्दी کتاب‌ها",
    "Marianela [es] [/x] :book: \\x1b %s {x}",
]
OBEYED = {
    "\x1b[2J\x1b]0;owned\x07": "\\u001b[2J\\u001b]0;owned\\u0007",
    "safe\rgone": "safe\\u000dgone",
    "\x9b31m\x9d": "\\u009b31m\\u009d",
    "txt.\u202eexe\u2069": "txt.\\u202eexe\\u2069",
    "a\u200bb\ufeffc\u2060": "a\\u200bb\\ufeffc\\u2060",
    "caf\udce9\udc9b": "caf\\udce9\\udc9b",
    "one\u2028two\u2029three\x85four": "one\\u2028two\\u2029three\\u0085four",
}
ANYTHING = st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF))


@pytest.mark.parametrize("text", KEPT)
def test_letters_of_all_kinds_stay(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(("text", "shown"), OBEYED.items())
def test_what_a_terminal_obeys_is_written_as_its_number(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(ANYTHING)
def test_no_control_is_left_and_nothing_else_is_lost(text: str) -> None:
    shown = printable(text)
    kinds = {unicodedata.category(char) for char in shown if char not in "\n\t"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(char) for char in shown} & {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "PDI"}
    assert printable(shown) == shown
    kept = iter(shown)
    assert all(char in kept for char in text if printable(char) == char)  # in their order


@given(ANYTHING)
def test_json_keeps_its_value(text: str) -> None:
    assert json.loads(printable(json.dumps({"text": [text]}, indent=1, ensure_ascii=False))) == {"text": [text]}


@given(ANYTHING, st.integers(0, 50))
def test_a_part_of_a_line_ends_no_line(text: str, most: int) -> None:
    assert len(one_line(text).splitlines()) <= 1
    assert len(one_line(text, most=most)) <= most
    assert one_line("a\nhint: b\r\x1b") == "a\\nhint: b\\u000d\\u001b"
