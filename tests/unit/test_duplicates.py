"""Documents that others contain are found wherever they begin there and however they are cut; the first one stays."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.data import duplicates

WORDS = [f"palabra{n}" for n in range(3000)]


def words_of(seed, count):
    return random.Random(seed).choices(WORDS, k=count)


def changed(words, *, share):
    """Some words replaced."""
    rng = random.Random(0)
    return ["otra" if rng.random() < share else word for word in words]


def contained(texts, *, num_characters=0):
    samples = duplicates.samples_of([" ".join(words) for words in texts])
    samples = duplicates.thinned(samples, num_characters=num_characters)
    return duplicates.find_contained(samples, num_documents=len(texts))


def test_a_part_is_found_in_the_whole_wherever_it_begins():
    book, other = words_of(1, 40_000), words_of(2, 10_000)
    assert contained([book, other, book[7_777:17_777], other[5_000:] + book[:5_000], words_of(3, 10_000)]) == [2, 3]


def test_a_book_in_other_pieces_is_all_found():
    book = words_of(4, 30_000)
    first = [book[n : n + 3_000] for n in range(0, 30_000, 3_000)]
    second = [book[n : n + 2_345] for n in range(0, 30_000, 2_345)]
    assert contained(first + second) == list(range(10, 10 + len(second)))


def test_what_is_new_stays_and_so_does_all_that_only_a_dropped_document_has():
    book, new = words_of(5, 10_000), words_of(6, 4_000)
    half = book[:2_000] + new[:2_000]
    mostly = book[:9_000] + new[2_000:3_000]  # dropped: nine tenths are known; the tenth goes with it
    assert contained([book, half, mostly, new[2_000:3_000]]) == [2]  # the last one is in a document that is gone


def test_changed_copies_go_and_a_rewritten_one_stays():
    text = words_of(11, 2_000)
    assert contained([words_of(12, 2_000), text, changed(text, share=0.01), changed(text, share=0.2)]) == [2]


def test_accents_and_capitals_make_no_difference():
    book = ["canción", "él", "fué", "España", "niño", *words_of(7, 5_000)]
    book = [word if n % 3 else word.replace("a", "á") for n, word in enumerate(book)]
    assert contained([book, [word.upper().replace("Á", "A") for word in book]]) == [1]


@pytest.mark.parametrize("words", [0, 3, 20])
def test_very_short_documents_are_never_alike(words):
    text = words_of(8, words)
    assert contained([text, text]) == []
    assert len(duplicates.samples_of([])) == 0


def test_of_a_large_corpus_a_smaller_part_is_looked_at():
    book = words_of(9, 60_000)
    large = 16 * duplicates.MAX_CHARACTERS
    assert contained([book, book[11_111:41_111], words_of(10, 30_000)], num_characters=large) == [1]
    samples = duplicates.samples_of([" ".join(book)])
    assert len(duplicates.thinned(samples, num_characters=duplicates.MAX_CHARACTERS)) == len(samples)
    assert len(duplicates.thinned(samples, num_characters=large)) < len(samples) / 10


@given(st.lists(st.sampled_from(["niño", "casa", "él", "A1", "x", "straße"]), max_size=30))
def test_words_are_runs_of_letters_and_digits(words):
    plain, starts = duplicates.word_hashes(" ".join(words).encode())
    decorated, _ = duplicates.word_hashes(("«¿" + "?», — ".join(words) + "…»").encode())
    assert len(plain) == len(words) == len(starts)
    assert (plain == decorated).all()
    assert len(set(plain.tolist())) == len(set(words))


def test_the_hashes_are_the_same_on_every_machine():
    """May change only together with `corpus.RECIPE`: a folder that was prepared would not be made again."""
    words, _ = duplicates.word_hashes(b"en un lugar")
    assert words.tolist() == [13914492225783885463, 10996929807994561638, 13141556269002674974]
