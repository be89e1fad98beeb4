"""Cleaning, cutting, dropping and splitting: pure functions of text."""

import textwrap
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuadrilla.data import clean
from cuadrilla.data.cuentos import stories


def run(*pieces, maximum=clean.MAX_DOCUMENT):
    counts = Counter()
    texts = [
        text
        for section in clean.sections(pieces, counts)
        for text in clean.documents(section, counts=counts, maximum=maximum)
    ]
    return texts, {name: count for name, count in counts.items() if count}


def book(chapters=40, words=60):
    """Paragraphs of about 400 characters that are all different."""
    return "\n\n".join(" ".join(f"palabra{c}x{w}" for w in range(words)) for c in range(chapters))


@pytest.mark.parametrize(
    ("text", "expected", "count"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd", {}),
        ("a\u2028b\u2029c\x85d\fe", "a\nb\n\nc\nd\ne", {}),
        ("n\0u\0l", "nul", {}),
        ("a\x07b\ufeffc\x9bd", "abcd", {}),
        ("ma\ufffdana", "ma\ufffdana", {"replacement_characters": 1}),
        ("a\ud83d b", "a\ufffd b", {"replacement_characters": 1}),
        ("nin\u0303o", "niño", {}),
        ("a  \n\t\n   \n\n  b \u00a0", "a\n\nb", {}),
        ("\n\n\n", None, {}),
    ],
)
def test_odd_text_is_repaired_and_counted(text, expected, count):
    assert run(text) == ([expected] if expected is not None else [], count)


def test_lines_that_were_broken_at_a_fixed_width_are_joined_and_verses_and_dialogues_stay():
    prose = " ".join(f"palabra{number}" for number in range(200))
    verses = "Tú, que imitaste la llorosa vida\nque tuve, ausente y desdeñado sobre"
    dialogue = "--Señor --dijo Sancho--, mire vuestra merced lo que dice y hace aquí\n--Calla."
    broken = "\n\n".join([textwrap.fill(prose, 72), verses, dialogue])
    texts, counts = run(broken)
    assert texts == ["\n\n".join([prose, verses, dialogue])]
    assert counts == {"lines_joined": broken.count("\n") - texts[0].count("\n")}
    poem = "\n".join(prose[start : start + 40 + start % 17].strip() for start in range(0, 1200, 57))
    for lines in (prose.replace(" ", "\n"), poem):
        assert run(lines) == ([lines], {})


def test_gutenberg_frame_and_credits_go():
    ebook = (
        "The Project Gutenberg EBook\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\n\n"
        "Produced by somebody. Text\nfile corrections by another.\n\n\nEn un lugar\n\nFin\n\n"
        "End of Project Gutenberg's X, by Y\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nLicence\n"
    )
    texts, counts = run(ebook, "more licence\n")
    assert texts == ["En un lugar\n\nFin"]
    assert counts["gutenberg_characters_dropped"] > 200


def test_a_small_text_is_one_document_and_a_long_one_is_cut_at_blank_lines():
    small = book(10)
    assert run(small)[0] == [small]
    long = book(300)
    texts, _ = run(long)
    assert "\n\n".join(texts) == long
    assert max(map(len, texts)) <= clean.MAX_DOCUMENT
    assert min(map(len, texts[:-1])) >= clean.MAX_DOCUMENT // 4


def test_a_long_text_is_cut_into_sections_at_blank_lines_wherever_its_pieces_end():
    text = book(300) + "\n" + "una línea\n" * 30_000
    whole = list(clean.sections([text], Counter(), size=20_000))
    assert "".join(whole) == text
    assert len(whole) > 10
    assert max(map(len, whole)) <= 40_000
    assert min(map(len, whole[:-1])) >= 20_000
    assert whole[0].endswith("\n\n")
    for size in (1000, 77_777):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(clean.sections(pieces, Counter(), size=20_000)) == whole


def test_an_endless_line_is_cut_at_blanks_and_memory_stays_bounded():
    total = 5 * clean.SECTION_CHARACTERS
    word = "abcdefghi "
    pieces = (word * 1000 for _ in range(total // 10_000))
    texts, _ = run(*pieces)
    assert max(map(len, texts)) <= clean.MAX_DOCUMENT
    assert set(" ".join(texts).split()) == {word.strip()}


@given(st.lists(st.text(alphabet=st.sampled_from("ab ñ\n\t\u2028\0n\u0303")), max_size=20), st.integers(1, 40))
@example(["aaaaaaaa\n", "aaaaaa\n", "a\na"], 15)  # only its line end makes the first paragraph too long
def test_how_the_text_arrives_in_pieces_changes_nothing(pieces, maximum):
    whole = run("".join(pieces), maximum=maximum)[0]
    assert run(*pieces, maximum=maximum)[0] == whole
    for text in whole:
        assert text
        assert unicodedata.is_normalized("NFC", text)
        assert "\n\n\n" not in text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=300))
def test_cleaning_twice_changes_nothing(text):
    once = run(text)[0]
    if once:
        assert run(once[0])[0] == once


def test_the_split_is_stable_when_documents_are_added():
    hashes = np.random.default_rng(0).integers(0, 2**64, size=2000, dtype=np.uint64)
    before = clean.split_documents(hashes[:1000], val_fraction=0.05)
    after = clean.split_documents(hashes, val_fraction=0.05)
    assert (after[:1000] == before).all()
    assert 0.03 < after.mean() < 0.07


@pytest.mark.parametrize("hashes", [[2**63, 2**63 + 5], [1, 2], [2**64 - 2, 2**64 - 1]])
def test_two_documents_are_enough_for_both_splits(hashes):
    is_val = clean.split_documents(np.array(hashes, dtype=np.uint64), val_fraction=0.1)
    assert is_val.tolist() == [True, False]


def test_a_text_is_on_one_side_and_stays_there_when_others_are_added():
    random = np.random.default_rng(0)
    texts = np.repeat(np.arange(400, dtype=np.uint32), random.integers(1, 9, size=400))
    hashes = random.integers(0, 2**64, size=len(texts), dtype=np.uint64)
    characters = random.integers(5_000, 20_000, size=len(texts), dtype=np.uint32)
    is_val = clean.split_texts(hashes, texts, characters, val_fraction=0.1)
    assert {bool(is_val[texts == text].all()) for text in range(400)} == {False, True}
    assert all(len(set(is_val[texts == text].tolist())) == 1 for text in range(400))
    assert 0.05 < characters[is_val].sum() / characters.sum() < 0.15
    first = texts < 200
    assert (clean.split_texts(hashes[first], texts[first], characters[first], val_fraction=0.1) == is_val[first]).all()


def test_a_text_that_is_most_of_the_corpus_is_not_held_out():
    hashes = np.array([0, 2**63, 2**62, 2**61], dtype=np.uint64)
    texts = np.arange(4, dtype=np.uint32)
    characters = np.array([20_000, 900, 1_000, 800], dtype=np.uint32)
    assert clean.split_texts(hashes, texts, characters, val_fraction=0.05).tolist() == [False, False, False, True]
    alike = np.full(4, 1_000, dtype=np.uint32)  # each is more than twice a twentieth: still one is held out
    assert clean.split_texts(hashes, texts, alike, val_fraction=0.05).tolist() == [True, False, False, False]


# Which documents the rules drop

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
    assert clean.reason_to_drop(text) == reason


def test_the_built_in_stories_pass():
    assert [story for story in stories(300, seed=0) if clean.reason_to_drop(story)] == []
