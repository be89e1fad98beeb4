"""Stories with exactly one planted error, to measure the checker with.

The errors are made from the slots of the derivation and from plain words; the checker is never asked. Each is wrong by
construction: a slot that must agree gets another form, one of several mentions changes (so they no longer match), a
function word is lost, doubled or changes place, or the end is cut before its full stop.

Invariant: the text differs from its original (`test_planted_errors_differ_from_the_original`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cuadrilla.data.cuentos.checker import known_words
from cuadrilla.data.cuentos.pairs import agreement_edits, later_mentions
from cuadrilla.data.cuentos.writer import Derivation, Dice, Span, derive


@dataclass(frozen=True, slots=True)
class PlantedError:
    text: str
    kind: str
    original: str


Edit = tuple[int, int, str]  # start, end, what to write there

_FUNCTION_WORDS = frozenset(
    ("a", "al", "con", "de", "del", "el", "en", "la", "las", "lo", "los", "por", "que", "se", "su", "sus", "un", "una")
)
_PLURAL_VERBS = {
    "dijo": "dijeron", "preguntó": "preguntaron", "contestó": "contestaron", "durmió": "durmieron",
    "llamaba": "llamaban", "vivía": "vivían", "volvió": "volvieron", "tenía": "tenían",
}  # fmt: skip
_WORD = re.compile(r"\w+")


def _slots(spans: Iterable[tuple[Span, str]]) -> list[Edit]:
    return [(span.start, span.end, other) for span, other in spans]


def _number(story: Derivation) -> list[Edit]:
    verbs = (word for word in _WORD.finditer(story.text) if word[0] in _PLURAL_VERBS)
    return _slots(agreement_edits(story, plural=True)) + [(*word.span(), _PLURAL_VERBS[word[0]]) for word in verbs]


def _function_words(text: str) -> Iterator[re.Match[str]]:
    """Function words between two plain words."""
    return (word for word in re.finditer(r"(?<=\w )\w+(?= \w)", text) if word[0] in _FUNCTION_WORDS)


def _missing_word(story: Derivation) -> list[Edit]:
    return [(word.start(), word.end() + 1, "") for word in _function_words(story.text)]


def _doubled_word(story: Derivation) -> list[Edit]:
    return [(*word.span(), f"{word[0]} {word[0]}") for word in _function_words(story.text)]


def _swapped_words(story: Derivation) -> list[Edit]:
    edits = []
    for word in _function_words(story.text):
        following = _WORD.match(story.text, word.end() + 1)
        assert following is not None, "a function word stands before a word"
        edits.append((word.start(), following.end(), f"{following[0]} {word[0]}"))
    return edits


def _punctuation(story: Derivation) -> list[Edit]:
    """A mark is lost, or a full stop inside the text becomes a comma."""
    lost = [(*mark.span(), "") for mark in re.finditer("[¿?¡!—]|[.,](?= )", story.text)]
    return lost + [(*mark.span(), ",") for mark in re.finditer(r"\.(?= )", story.text)]


def _truncated_end(story: Derivation) -> list[Edit]:
    """The last sentence stops after one of its words but the last."""
    start = max(story.text.rfind(". "), story.text.rfind("\n"))
    ends = [word.end() for word in _WORD.finditer(story.text, start)][:-1]
    return [(end, len(story.text), "") for end in ends]


def _misspelling(story: Derivation) -> list[Edit]:
    """A letter inside a word is doubled, lost or swapped with the next one, and no known word results."""
    edits = []
    for word in _WORD.finditer(story.text):
        letters = word[0]
        for place in range(1, len(letters) - 1):
            head, letter, after, tail = letters[:place], letters[place], letters[place + 1], letters[place + 2 :]
            for wrong in (head + letter * 2 + after + tail, head + after + tail, head + after + letter + tail):
                if wrong not in known_words():
                    edits.append((*word.span(), wrong))
    return edits


PLANTERS: Mapping[str, Callable[[Derivation], list[Edit]]] = {
    "gender": lambda story: _slots(agreement_edits(story, plural=False)),
    "number": _number,
    "character": lambda story: _slots(later_mentions(story, "character")),
    "object": lambda story: _slots(later_mentions(story, "object")),
    "cause": lambda story: _slots(later_mentions(story, "cause")),
    "missing word": _missing_word,
    "doubled word": _doubled_word,
    "swapped words": _swapped_words,
    "punctuation": _punctuation,
    "truncated end": _truncated_end,
    "misspelling": _misspelling,
}


def plant_error(text_index: int, *, seed: int = 0) -> PlantedError:
    """Story `text_index` of a seed with one error; the next kind is taken where the story has no place for one."""
    story = derive(text_index, seed=seed)
    dice = Dice(f"planted:{seed}:{text_index}")
    kinds = list(PLANTERS)
    first = dice.below(len(kinds))
    for kind in kinds[first:] + kinds[:first]:
        edits = PLANTERS[kind](story)
        if edits:
            start, end, wrong = edits[dice.below(len(edits))]
            return PlantedError(story.text[:start] + wrong + story.text[end:], kind, story.text)
    raise AssertionError("every story has words to misspell")
