"""Which documents are not worth learning from: what no book has is dropped, mostly figures and marks, words without
end, the same lines over and over. Verse, dialogue, old spelling, lists of chapters and other languages pass.

Pages of the web want more than that: filter them first, for example with datatrove (FineWeb-2's rules for Spanish:
https://github.com/huggingface/fineweb-2, configs/spa_Latn.yml).
"""

import numpy as np

MAX_REPEATED = 0.5
"""Share of the characters in lines that repeat an earlier one."""
MIN_LETTERS = 0.4
"""Share of letters among what is not blank."""
WORD_LENGTH = (1.5, 40)
"""Mean bytes of a word, least and most."""
_LETTERS = np.array([byte >= 128 or chr(byte).isalpha() for byte in range(256)])
_BLANKS = np.array([chr(byte).isspace() for byte in range(128)] + [False] * 128)


def reason_to_drop(text: str) -> str | None:
    """The first rule that a document breaks, as a key for counts; None if it is kept."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "empty"
    num_characters = sum(map(len, lines))
    if num_characters - sum(map(len, set(lines))) > MAX_REPEATED * num_characters:
        return "repeated_lines"
    raw = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
    is_blank = _BLANKS[raw]
    num_words = int(np.count_nonzero(is_blank[:-1] & ~is_blank[1:])) + 1
    num_words += int(np.count_nonzero(raw >= 0xE3))  # from U+3000 on, scripts put no blanks between words
    num_visible = len(raw) - int(np.count_nonzero(is_blank))
    if int(np.count_nonzero(_LETTERS[raw])) < MIN_LETTERS * num_visible:
        return "few_letters"
    least, most = WORD_LENGTH
    return None if least <= num_visible / num_words <= most else "word_length"
