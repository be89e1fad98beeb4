"""Which documents are not worth learning from, and why: measures of one document against thresholds.

* `WEB` has the thresholds that FineWeb-2 tuned for Spanish (`spa_Latn`), for pages from the web:
  https://github.com/huggingface/fineweb-2 (configs/spa_Latn.yml), rules of Gopher (https://arxiv.org/abs/2112.11446,
  table A1) and FineWeb (https://arxiv.org/abs/2406.17557). Its words come from a tokenizer of Spanish, ours are runs of
  letters and digits and single marks; its language score is that of GlotLID, ours is the stop-word score.
* `BOOKS` keeps literature: verse, dialogue, old spelling, lists of chapters and other languages pass. It drops what no
  book has: mostly figures and marks, words without end, the same lines over and over.

The stop-word score is the share of words that are among the sixteen most frequent of Spanish. It tells Spanish
from distant languages, not from its neighbours (Catalan, Galician), and says nothing of quality.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STOP_WORDS = frozenset(
    ("de", "la", "en", "el", "y", "a", "que", "del", "los", "se", "por", "un", "con", "una", "las", "su")
)
_WORD = re.compile(r"[^\W_]+|\.{2,}|[^\w\s]|_")
_LINE_ENDS = (".", "'", '"', "!", "?", "…", "»", "”", "’", ":")
"""FineWeb's, and how a sentence also ends in Spanish typography."""
_LETTERS = np.array([byte >= 128 or chr(byte).isalpha() for byte in range(256)])
_BLANKS = np.array([chr(byte).isspace() for byte in range(128)] + [False] * 128)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """None: the rule is off. Shares are of characters unless the name says words or lines."""

    min_words: int | None = None
    min_language: float | None = None
    """Stop-word score."""
    max_duplicate_lines: float | None = None
    """Share of lines that repeat an earlier one."""
    max_duplicate_line_characters: float | None = None
    max_top_ngram: tuple[tuple[int, float], ...] = ()
    """(n, share taken by the most frequent n words in a row)."""
    max_duplicate_ngrams: tuple[tuple[int, float], ...] = ()
    """(n, share taken by n words in a row that occurred before)."""
    min_line_punctuation: float | None = None
    """Share of lines that end as a sentence does."""
    max_newlines_per_word: float | None = None
    mean_word_length: tuple[float, float] | None = None
    min_alphabetic_words: float | None = None
    """Share of words, punctuation marks included, with a letter in them."""
    min_stop_words: int | None = None
    min_letters: float | None = None
    """Share of letters among what is not blank."""


WEB = Thresholds(
    min_words=50,
    min_language=0.2,
    max_duplicate_lines=0.252,
    max_top_ngram=((2, 0.156), (3, 0.14), (4, 0.125)),
    max_duplicate_ngrams=((5, 0.145), (6, 0.136), (7, 0.127), (8, 0.117), (9, 0.108), (10, 0.099)),
    min_line_punctuation=0.182,
    max_duplicate_line_characters=0.1,
    max_newlines_per_word=0.138,
    mean_word_length=(3, 14),
    min_alphabetic_words=0.825,
    min_stop_words=2,
)
BOOKS = Thresholds(max_duplicate_line_characters=0.5, mean_word_length=(1.5, 40), min_letters=0.4)
NONE = Thresholds()
FILTERS = {"books": BOOKS, "web": WEB, "none": NONE}


def reason_to_drop(text: str, limits: Thresholds) -> str | None:
    """The first rule that a document breaks, as a key for counts; None if it is kept."""
    if limits == NONE:
        return None
    return _by_lines(text, limits) or _by_letters(text, limits) or _by_words(text, limits)


def _by_lines(text: str, limits: Thresholds) -> str | None:
    if limits.max_duplicate_line_characters is None and limits.max_duplicate_lines is None:
        return None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "empty"
    distinct = set(lines)
    if len(distinct) < len(lines):
        repeated = sum(map(len, lines)) - sum(map(len, distinct))
        most = limits.max_duplicate_lines
        if most is not None and 1 - len(distinct) / len(lines) > most:
            return "repeated_lines"
        most = limits.max_duplicate_line_characters
        if most is not None and repeated > most * sum(map(len, lines)):
            return "repeated_lines"
    if limits.min_line_punctuation is not None:
        ended = sum(line.rstrip().endswith(_LINE_ENDS) for line in lines)
        if ended < limits.min_line_punctuation * len(lines):
            return "lines_without_punctuation"
    return None


def _by_letters(text: str, limits: Thresholds) -> str | None:
    """Rules that need no list of words, on bytes."""
    if limits.min_letters is None:
        return None
    raw = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
    is_blank = _BLANKS[raw]
    num_words = int(np.count_nonzero(is_blank[:-1] & ~is_blank[1:])) + 1
    num_words += int(np.count_nonzero(raw >= 0xE3))  # from U+3000 on, scripts put no blanks between words
    num_visible = len(raw) - int(np.count_nonzero(is_blank))
    if int(np.count_nonzero(_LETTERS[raw])) < limits.min_letters * num_visible:
        return "few_letters"
    if limits.mean_word_length is not None:
        least, most = limits.mean_word_length
        if not least <= num_visible / num_words <= most:
            return "word_length"
    return None


def _by_words(text: str, limits: Thresholds) -> str | None:
    if limits.min_alphabetic_words is None:
        return None
    tokens = _WORD.findall(text.lower())
    numbers = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    ids = np.fromiter(map(numbers.__getitem__, tokens), dtype=np.int64, count=len(tokens))
    is_word = np.array([token.isalnum() for token in numbers], dtype=bool)[ids]
    lengths = np.fromiter(map(len, numbers), dtype=np.int64, count=len(numbers))[ids]
    num_words = int(is_word.sum())
    if num_words < max(1, limits.min_words or 0):
        return "few_words"
    num_stops = int(np.array([token in STOP_WORDS for token in numbers])[ids].sum())
    if limits.min_language is not None and num_stops < limits.min_language * num_words:
        return "language"
    if reason := _repetition(ids.astype(np.uint64), lengths, len(text), limits):
        return reason
    if limits.max_newlines_per_word is not None and text.count("\n") > limits.max_newlines_per_word * len(tokens):
        return "many_lines"
    if limits.mean_word_length is not None:
        least, most = limits.mean_word_length
        if not least <= lengths[is_word].mean() <= most:
            return "word_length"
    has_letter = np.array([any(map(str.isalpha, token)) for token in numbers])[ids]
    if int(has_letter.sum()) < limits.min_alphabetic_words * len(tokens):
        return "few_letters"
    return "stop_words" if limits.min_stop_words is not None and num_stops < limits.min_stop_words else None


def _repetition(
    ids: NDArray[np.uint64], widths: NDArray[np.int64], num_characters: int, limits: Thresholds
) -> str | None:
    """`ids` and `widths`: number and characters of each word."""
    ends = np.concatenate([[0], np.cumsum(widths)])
    for n, share in limits.max_top_ngram:
        if len(ids) >= n and _top_ngram(ids, ends, n) > share * num_characters:
            return "repeated_words"
    for n, share in limits.max_duplicate_ngrams:
        if len(ids) < n:
            break
        keys = _ngrams(ids, n)
        first = np.unique(keys, return_index=True)[1]
        if len(first) == len(keys):
            break  # n words never come twice, so neither do n + 1
        lengths = ends[n:] - ends[:-n]
        is_repeated = np.ones(len(keys), dtype=bool)
        is_repeated[first] = False
        most = share * num_characters
        if lengths[is_repeated].sum() <= most:  # an upper bound: it counts places that overlap
            continue
        if _repeated_characters(keys.tolist(), lengths.tolist(), n) > most:
            return "repeated_words"
    return None


def _ngrams(ids: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each n neighbours."""
    keys = ids[: len(ids) - n + 1].copy()
    for offset in range(1, n):
        keys = (keys ^ (keys >> np.uint64(29))) * _MIX + ids[offset : len(ids) - n + 1 + offset]
    return keys


def _top_ngram(ids: NDArray[np.uint64], ends: NDArray[np.int64], n: int) -> int:
    """Characters taken by the most frequent n-gram, blanks between its words included."""
    _, first, counts = np.unique(_ngrams(ids, n), return_index=True, return_counts=True)
    best = int(counts.max())
    start = int(first[counts == best].min())
    return best * int(ends[start + n] - ends[start] + n - 1)


def _repeated_characters(keys: list[int], lengths: list[int], n: int) -> int:
    """Characters of n-grams that occurred before; none is counted in two of them."""
    seen: set[int] = set()
    total = position = 0
    while position < len(keys):
        if keys[position] in seen:
            total += lengths[position]
            position += n
        else:
            seen.add(keys[position])
            position += 1
    return total
