"""Signatures, candidates and the first document that stays."""

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.data import duplicates

pytestmark = pytest.mark.unit

WORDS = [f"palabra{n}" for n in range(500)]


def text_of(seed, *, words=300):
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def changed(text, *, share, seed=0):
    """`text` with some words replaced."""
    rng = random.Random(seed)
    return " ".join("otra" if rng.random() < share else word for word in text.split())


def jaccard(one, other):
    sets = []
    for text in (one, other):
        words = re.findall(r"\w+", text.lower())
        sets.append({tuple(words[n : n + 5]) for n in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def found_in(texts, *, similarity=duplicates.DEFAULT_SIMILARITY):
    signatures = duplicates.sketches(texts).signatures
    size = duplicates.BAND_HASHES
    pairs = [
        duplicates.candidates(duplicates.band_keys(signatures[band * size : (band + 1) * size]))
        for band in range(duplicates.NUM_BANDS)
    ]
    return duplicates.near_duplicates(
        np.concatenate(pairs), lambda document: signatures[:, document], similarity=similarity
    )


def test_signatures_estimate_the_similarity_of_word_sequences():
    base = text_of(1, words=2000)
    for share in (0.005, 0.02, 0.05, 0.2):
        other = changed(base, share=share)
        one, two = duplicates.sketches([base, other]).signatures.T
        assert abs(np.mean(one == two) - jaccard(base, other)) < 0.15  # 3 standard deviations of 112 hashes


def test_the_first_stays_and_later_versions_go():
    base = text_of(2)
    texts = [text_of(3), base, text_of(4), changed(base, share=0.01), base.upper().replace(" ", ",  "), text_of(5)]
    assert [document for document, _ in found_in(texts)] == [3, 4]
    assert {kept for _, kept in found_in(texts)} == {1}
    assert found_in([texts[3], *texts[:3]])[0] == (2, 0)


def test_a_chain_of_small_changes_does_not_drop_what_no_kept_document_resembles():
    chain = [text_of(6)]
    for step in range(12):
        chain.append(changed(chain[-1], share=0.02, seed=step))
    kept = [n for n in range(len(chain)) if n not in dict(found_in(chain))]
    assert kept[0] == 0
    assert 1 < len(kept) < len(chain)


def test_a_signature_does_not_depend_on_its_neighbours():
    texts = [text_of(7), "¡Corto!", "", text_of(8, words=6), "«Ñandú» — " * 20]
    together = duplicates.sketches(texts).signatures
    for number, text in enumerate(texts):
        assert (duplicates.sketches([text]).signatures[:, 0] == together[:, number]).all()


def test_texts_without_five_words_are_never_alike():
    assert found_in(["uno dos tres", "uno dos tres", "", ""]) == []
    assert duplicates.sketches([]).signatures.shape == (duplicates.NUM_HASHES, 0)


@given(st.lists(st.sampled_from(["niño", "casa", "él", "A1", "x", "straße"]), max_size=30))
def test_words_are_runs_of_letters_and_digits(words):
    plain, starts = duplicates.word_hashes(" ".join(words).encode())
    decorated, _ = duplicates.word_hashes(("«¿" + "?», — ".join(words) + "…»").encode())
    assert len(plain) == len(words) == len(starts)
    assert (plain == decorated).all()
    assert len(set(plain.tolist())) == len(set(words))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_the_first_of_equals(rows):
    high, low = (np.array([row[n] for row in rows], dtype=np.uint64) for n in range(2))
    expected = [rows.index(row) for row in rows]
    assert duplicates.first_of_equals(high, low).tolist() == expected


@given(st.lists(st.integers(0, 5), max_size=40))
def test_candidates_are_later_documents_with_the_first_of_their_key(keys):
    pairs = duplicates.candidates(np.array(keys, dtype=np.uint64)).tolist()
    expected = [(n, keys.index(key)) for n, key in enumerate(keys) if key and keys.index(key) < n]
    assert sorted((pair >> 32, pair & 0xFFFFFFFF) for pair in pairs) == expected


def test_the_hashes_are_the_same_on_every_machine():
    """May change only together with `options.RECIPE`: work that was kept would not be found again."""
    rows = duplicates.sketches(["En un lugar de la Mancha, de cuyo nombre no quiero acordarme"]).signatures
    assert rows[:3, 0].tolist() == [166097458, 803806439, 344680050]
