"""What lies in other documents: wherever it begins there, however it is cut."""

import random

import numpy as np
import pytest

from cuadrilla.data import containment
from cuadrilla.data.duplicates import sketches

pytestmark = pytest.mark.unit

WORDS = [f"palabra{n}" for n in range(3000)]


def words_of(seed, count):
    return random.Random(seed).choices(WORDS, k=count)


def held_in(texts, *, share=0.8, halvings=0):
    samples = containment.thinned(sketches([" ".join(words) for words in texts]).samples, halvings=halvings)
    return containment.find_contained(samples, num_documents=len(texts), share=share)


def test_a_part_is_found_in_the_whole_wherever_it_begins():
    book, other = words_of(1, 40_000), words_of(2, 10_000)
    held = held_in([book, other, book[7_777:17_777], other[5_000:] + book[:5_000], words_of(3, 10_000)])
    assert held[0] == (2, 0)
    assert held[1][0] == 3
    assert len(held) == 2


def test_a_book_in_other_pieces_is_all_found():
    book = words_of(4, 30_000)
    first = [book[n : n + 3_000] for n in range(0, 30_000, 3_000)]
    second = [book[n : n + 2_345] for n in range(0, 30_000, 2_345)]
    assert [document for document, _ in held_in(first + second)] == list(range(10, 10 + len(second)))


def test_what_is_new_stays_and_so_does_all_that_only_a_dropped_document_has():
    book, new = words_of(5, 10_000), words_of(6, 4_000)
    half = book[:2_000] + new[:2_000]
    mostly = book[:9_000] + new[2_000:3_000]  # dropped: nine tenths are known; the tenth goes with it
    held = held_in([book, half, mostly, new[2_000:3_000]])
    assert [document for document, _ in held] == [2]  # the last one is known from a document that is gone


def test_accents_and_capitals_make_no_difference():
    book = ["canción", "él", "fué", "España", "niño", *words_of(7, 5_000)]
    book = [word if n % 3 else word.replace("a", "á") for n, word in enumerate(book)]
    same = [word.upper().replace("Á", "A") for word in book]
    assert held_in([book, same]) == [(1, 0)]


def test_short_documents_are_left_to_their_signatures():
    text = words_of(8, 100)
    assert held_in([text, text]) == []
    assert held_in([[], []]) == []


def test_fewer_samples_are_the_same_ones_in_every_text():
    book = words_of(9, 60_000)
    held = held_in([book, book[11_111:41_111], words_of(10, 30_000)], halvings=2)
    assert held == [(1, 0)]
    all_of_it = sketches([" ".join(book)]).samples
    assert np.isin(containment.thinned(all_of_it, halvings=3), containment.thinned(all_of_it, halvings=2)).all()
