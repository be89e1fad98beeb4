"""Minimal pairs: two endings of one context. The grammar allows only one of them.

A pair is cut from a story at a slot that the text before it already decides. One ending has the right form or mention
there, the other a wrong one of the same kind; the rest of the sentence is the same.

Invariants: `good` and `bad` begin with `context` and differ in one place; `good` is the beginning of a story that
passes (`test_minimal_pairs_differ_in_one_place`). The phenomena take turns.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cuadrilla.data.cuentos.lexicon import MENTION_KINDS, VARIABLES, Bindings, Entry
from cuadrilla.data.cuentos.template import Adjective, Agreement, Mention, form_index, realise
from cuadrilla.data.cuentos.writer import Derivation, Dice, Span, derive

PHENOMENA = ("gender", "number", "clitic", "character", "object", "cause")
_SENTENCE_END = re.compile(r"[.?!]|$")


@dataclass(frozen=True, slots=True)
class MinimalPair:
    """`good` and `bad` are whole texts: each is `context` followed by an ending."""

    context: str
    good: str
    bad: str
    phenomenon: str


def minimal_pairs(count: int, *, seed: int = 1) -> Iterator[MinimalPair]:
    """`count` pairs from different stories of a seed, which must not be the training seed (0 by convention)."""
    index = 0
    for number in range(count):
        phenomenon = PHENOMENA[number % len(PHENOMENA)]
        pair = None
        while pair is None:
            pair = _pair(index, phenomenon, seed=seed)
            index += 1
        yield pair


def _pair(index: int, phenomenon: str, *, seed: int) -> MinimalPair | None:
    story = derive(index, seed=seed)
    options = list(_contrasts(story, phenomenon))
    if not options:
        return None
    span, wrong = options[Dice(f"pair:{seed}:{index}").below(len(options))]
    context = story.text[: span.start]
    end = _SENTENCE_END.search(story.text, span.end)
    assert end is not None, "the pattern matches the end of the text"
    rest = story.text[span.end : end.end()]
    return MinimalPair(context, context + story.text[span.start : span.end] + rest, context + wrong + rest, phenomenon)


def _contrasts(story: Derivation, phenomenon: str) -> Iterator[tuple[Span, str]]:
    if phenomenon in {"character", "object", "cause"}:
        yield from _later_mentions(story, phenomenon)
        return
    for plural in (True,) if phenomenon == "number" else (False, True) if phenomenon == "clitic" else (False,):
        for span, wrong in _agreement_edits(story, plural=plural):
            is_clitic = isinstance(span.slot, Agreement) and span.slot.is_clitic
            if _decided_before(span, story) and is_clitic == (phenomenon == "clitic"):
                yield span, wrong


def _decided_before(span: Span, story: Derivation) -> bool:
    """Whether the text before the slot decides which form is right. For an adjective, its noun is enough."""
    if not isinstance(span.slot, Adjective):
        return span.given
    noun = span.slot.noun
    return any(noun in _named(other) for other in story.spans if other.end <= span.start)


def _named(span: Span) -> tuple[str, ...]:
    return () if isinstance(span.slot, Agreement) else (span.slot.variable,)


def _agreement_edits(story: Derivation, *, plural: bool) -> Iterator[tuple[Span, str]]:
    """Each agreeing slot, with its form in the other number (if `plural`) or else in the other gender."""
    for span in story.spans:
        match span.slot:
            case Agreement(variables=variables, forms=forms):
                entries = tuple(story.bound[name] for name in variables)
            case Adjective(variable=variable, noun=noun):
                entries = (story.bound[noun],)
                adjective_forms = story.bound[variable].forms
                assert adjective_forms is not None, f"{variable} is not an adjective"
                forms = adjective_forms
            case _:
                continue
        index = form_index(entries)
        other = forms[index ^ 2 if plural else index ^ 1]
        if other != forms[index]:
            yield span, other


def _later_mentions(story: Derivation, kind: str) -> Iterator[tuple[Span, str]]:
    """Each mention of a character, object or cause except the first, with a wrong one to replace it.

    The wrong one has the same gender and number, and occurs nowhere in the story. So only the meaning is wrong.
    """
    seen: set[str] = set()
    for span in story.spans:
        if not isinstance(span.slot, Mention) or MENTION_KINDS.get(span.slot.variable) != kind:
            continue
        name = span.slot.variable
        if name in seen:
            yield from ((span, other) for other in _other_readings(story.bound, span.slot))
        seen.add(name)


def _other_readings(bound: Bindings, slot: Mention) -> Iterator[str]:
    ours = bound[slot.variable]
    for entry in VARIABLES[slot.variable]:
        same_form = (entry.gender, entry.plural) == (ours.gender, ours.plural)
        if same_form and not _in_use(entry, bound):
            yield realise(slot, {**bound, slot.variable: entry})


def _in_use(entry: Entry, bound: Bindings) -> bool:
    return any(entry is other for other in bound.values())
