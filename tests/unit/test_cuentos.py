import hashlib
import random
import re
from collections import Counter

import pytest

from cuadrilla.data.cuentos import fault_of, minimal_pairs, stories
from cuadrilla.data.cuentos.checker import known_words
from cuadrilla.data.cuentos.pairs import PHENOMENA

# Changes only together with the grammar or the lexicon; then a model trained on older stories no longer fits them.
GOLDEN_SHA256 = "05d9d5210d783a581b61f86dc6156b31afb2475bb265e6b96b127778f22124a0"

EXAMPLE = """\
Había una vez una niña que se llamaba Lucía Rivera. Lucía era muy valiente. Tenía una cometa roja de papel y la \
llevaba a todas partes. Un sábado, llevó su cometa a la playa. Cuando volvió a casa, ya no la tenía.
—¡He perdido mi cometa! —dijo Lucía.
Su amigo Diego la oyó y quiso ayudar. Juntos buscaron por todas partes.
—¡La encontré! Estaba junto a una piedra —dijo Diego.
Lucía abrazó a Diego y guardó su cometa. Desde aquel día, Lucía y Diego fueron muy buenos amigos."""


def test_golden_story() -> None:
    text = "\n\n".join(stories(100))
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_SHA256


def test_seeds_do_not_share_stories() -> None:
    trained = set(stories(20_000, seed=0))
    assert sum(text in trained for text in stories(2_000, seed=1)) <= 2


def test_every_word_is_common_enough_to_be_learnt() -> None:
    texts = list(stories(6_000))
    counts = Counter(word for text in texts for word in set(re.findall(r"\w+", text.lower())))
    assert set(counts) == {word.lower() for word in known_words()}
    assert min(counts.values()) >= len(texts) / 300


def test_checker_accepts_every_generated_story() -> None:
    assert [text for text in stories(3_000, seed=7) if fault_of(text)] == []


@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        ("una niña", "un niño", "agreement"),
        ("una cometa roja de papel", "un cometa roja de papel", "agreement"),
        ("cometa roja", "cometa rojo", "agreement"),
        ("ya no la tenía", "ya no lo tenía", "agreement"),
        ("buenos amigos", "buenas amigas", "agreement"),
        ("—dijo Lucía", "—dijo Marta", "character"),
        ("y Diego fueron", "y Hugo fueron", "character"),
        ("mi cometa", "mi pelota", "object"),
        ("su cometa.", "su flauta.", "object"),
        ("—¡He", "—He", "punctuation"),
        ("—dijo Diego.", "—dijo Diego,", "punctuation"),
        ("cometa roja", "cometa rroja", "unknown word"),
        (" Juntos buscaron por todas partes.", "", "structure"),
        (" Desde aquel día, Lucía y Diego fueron muy buenos amigos.", "", "structure"),
        (" amigos.", "", "structure"),
        ("fueron muy", "fueron fueron muy", "structure"),
    ],
)
def test_checker_names_the_fault(right: str, wrong: str, kind: str) -> None:
    assert EXAMPLE.count(right) >= 1
    assert fault_of(EXAMPLE.replace(right, wrong, 1)) == kind


def test_checker_wants_one_whole_story() -> None:
    assert fault_of("") == "structure"
    assert fault_of(f"{EXAMPLE}\n{EXAMPLE}")
    assert fault_of(EXAMPLE[: len(EXAMPLE) // 2])


SMALL_WORD = r"(?<=\w )(al|con|del?|en|las?|los?|por|que|se|sus?|una?)"
PLANTED = {
    rf"{SMALL_WORD} (?=\w)": "",
    rf"{SMALL_WORD}(?= \w)": r"\1 \1",
    rf"{SMALL_WORD} (\w+)": r"\2 \1",
    r"[¿?¡!—]|[.,](?= )": "",
    r" \w+\W*$": "",
    r"(?<=\w)(\w)(?=\w)": r"\1\1",
}
"""Faults by the pattern of the place: a word lost, doubled or moved, a punctuation mark lost, the end cut off, a letter
doubled."""


def test_checker_rejects_planted_errors() -> None:
    """One error in each story. The tests of minimal pairs below have wrong agreement and wrong mentions."""
    chance, accepted = random.Random(5), []
    for text in stories(1_000, seed=5):
        pattern, wrong = chance.choice([*PLANTED.items()])
        place = chance.choice([*re.finditer(pattern, text)])
        planted = text[: place.start()] + place.expand(wrong) + text[place.end() :]
        accepted += [] if fault_of(planted) else [planted]
    assert len(accepted) <= 10, accepted[0]


def test_minimal_pairs_differ_in_one_place() -> None:
    pairs = list(minimal_pairs(120))
    assert Counter(pair.phenomenon for pair in pairs) == dict.fromkeys(PHENOMENA, 20)
    for pair in pairs:
        good, bad = pair.good.removeprefix(pair.context), pair.bad.removeprefix(pair.context)
        assert pair.good.startswith(pair.context)
        assert pair.bad.startswith(pair.context)
        assert good[-1] == bad[-1]
        assert good != bad
        assert abs(len(good) - len(bad)) <= 40


def test_only_the_good_half_of_a_pair_begins_a_story() -> None:
    texts = list(stories(800, seed=1))
    for pair in minimal_pairs(60):
        whole = next(text for text in texts if text.startswith(pair.good))
        assert fault_of(whole) is None
        assert fault_of(pair.bad + whole.removeprefix(pair.good))
