r"""What others have written, made fit to be shown: file names, models' texts, what other machines say, logs.

A terminal obeys some characters instead of showing them, and others change how their neighbours look. These are
written as their number (`\u001b`), as JSON does it: JSON stays the same value, and nobody has to guess what was there.

* Controls (C0, DEL, C1, which a terminal also obeys in UTF-8) but for the line feed and the tab, that our own texts
  are made with. A carriage return would write over its line.
* Line and paragraph separators, and the marks of direction: a name with U+202E reads backwards (CVE-2021-42574).
* What has no width and no use in a name (U+200B, U+2060 to U+2064, U+FEFF): two names would look the same. U+200C and
  U+200D stay, Persian and families of emoji are written with them; so do soft hyphens and the tags in flags.
* Halves of a character (surrogates): Python's stand-ins for bytes of a file's name, which a C locale writes as bytes.
"""

import re
import textwrap

_LABEL = re.compile(r"\w+ {2,}| +")
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The same text, in as many lines, with nothing in it that acts on a terminal. Done twice it is done once."""
    return _ACTIVE.sub(_number, text)


def one_line(text: str, *, most: int | None = None) -> str:
    r"""The same as a part of a line of ours, which it must not end: a line feed is `\n`. `most`: characters to keep."""
    return printable(text[:most]).replace("\n", "\\n")[:most]


def _number(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def filled(text: str, width: int) -> str:
    """Lines broken between words, below the first one's text where it has a label; a long path stays whole."""
    broken = [
        textwrap.fill(
            line, width, subsequent_indent=" " * len(label[0]) if (label := _LABEL.match(line)) else "",
            break_long_words=False, break_on_hyphens=False,
        )
        for line in text.splitlines()
    ]  # fmt: skip
    return "\n".join(broken)
