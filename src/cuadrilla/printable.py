r"""Makes foreign text safe to show: file names, output of models, messages of other machines, logs.

A terminal obeys some characters instead of showing them; others change how their neighbours look. Each of these is
replaced by its number (`\u001b`), as in JSON: JSON text keeps its value, and a reader sees what was there.

* Control characters (C0, DEL, C1, which a terminal also obeys in UTF-8), except line feed and tab, which our own texts
  use. A carriage return would overwrite its line.
* Line and paragraph separators, and the marks of direction: a name with U+202E reads backwards (CVE-2021-42574).
* Characters without width or use in a name (U+200B, U+2060 to U+2064, U+FEFF): two names would look the same. U+200C
  and U+200D stay, because Persian and family emoji need them. Soft hyphens and the tags in flags stay, too.
* Lone surrogates: Python's stand-ins for undecodable bytes of a file name. In a C locale they are printed as bytes.
"""

import re
import textwrap

_LABEL = re.compile(r"(?: \S+ +)?[\w.-]+ {2,}| +")
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with all such characters escaped, in as many lines. A second call changes nothing."""
    return _ACTIVE.sub(_number, text)


def one_line(text: str, *, most: int | None = None) -> str:
    r"""The printable text for use within a line: a line feed becomes `\n`. `most`: the number of characters to keep."""
    return printable(text[:most]).replace("\n", "\\n")[:most]


def _number(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def filled(text: str, width: int) -> str:
    """The lines, wrapped between words and indented below the text that follows a label. A long path stays whole."""
    broken = [
        textwrap.fill(
            line, width, subsequent_indent=" " * len(label[0]) if (label := _LABEL.match(line)) else "",
            break_long_words=False, break_on_hyphens=False,
        )
        for line in text.splitlines()
    ]  # fmt: skip
    return "\n".join(broken)
