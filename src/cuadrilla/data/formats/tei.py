"""TEI-XML: the text that a reader of the book reads, without header, notes, front and back matter.

Everything inside `<body>` is text, except the elements in `_LEFT_OUT` and references to notes (`<ref target="#n1">`).
Of a `<choice>`, only the corrected, regularised or expanded reading is text. A blank line separates paragraphs, heads
and groups of verses; a line end separates verses and stands for a line break. Other white space is layout. Each
outermost `<body>` is a text of its own. (TEI P5 Guidelines, chapters 3-7; P4 uses the same names.)

lxml holds one `<body>` at a time, within libxml2's limits (`huge_tree=False`: 10 MB of text without a tag, 256 levels).
Entities are not expanded and nothing outside the file is opened. HTML's named characters (`&ntilde;`) need no DTD.
"""

import html
import re
from collections.abc import Iterator
from typing import IO, Any

from cuadrilla.data.formats.files import missing
from cuadrilla.errors import DataError

ROOTS = ("TEI", "TEI.2", "teiCorpus", "teiCorpus.2")

_LEFT_OUT = {"note", "noteGrp", "teiHeader", "front", "back", "figDesc", "fw", "del", "index"}
_OTHER_READING = {"sic", "orig", "abbr"}

_PARAGRAPH, _LINE, _MARK = "\x1c", "\x1d", "\x1e"
"""Placeholders for white space and references to notes, until a body is complete. XML cannot contain them."""
_PARAGRAPHS = (
    *("p", "ab", "head", "lg", "sp", "list", "table", "figure", "epigraph", "argument", "trailer"),
    *("opener", "closer", "postscript", "floatingText", "body", "div", *(f"div{depth}" for depth in range(8))),
)
_LINES = ("l", "lb", "item", "row", "speaker", "stage", "salute", "signed", "dateline", "byline", "label")
_SPACE = {**dict.fromkeys(_PARAGRAPHS, _PARAGRAPH), **dict.fromkeys(_LINES, _LINE), "cell": " "}
"""White space around an element, by its name."""
_LAYOUT = str.maketrans("\n\t\r", "   ")
_MARKS = re.compile(rf" *({_MARK} *)+(?=[,.;:)\]!?»])|{_MARK}")
_GAPS = re.compile(rf"[ {_PARAGRAPH}{_LINE}]{{2,}}|[{_PARAGRAPH}{_LINE}]")


def read(stream: IO[bytes], *, where: str) -> tuple[str, list[str]] | None:
    """The encoding of a TEI file, and the text of each outermost `<body>` that is not empty; None for other XML.

    Raises DataError if the XML is not well-formed.
    """
    try:
        from lxml import etree
    except ImportError as error:
        raise missing("lxml", suffix=".xml") from error
    texts: list[str] = []
    parsed = etree.iterparse(stream, resolve_entities=False, no_network=True, huge_tree=False)
    try:
        for _, element in parsed:
            if _name(element) == "body" and _LEFT_OUT.union(["body"]).isdisjoint(map(_name, element.iterancestors())):
                texts.append(_text(element))
                element.clear(keep_tail=True)
    except (etree.XMLSyntaxError, LookupError) as error:
        raise DataError(
            "{where}:{line}: not well-formed XML: {error}",
            where=where,
            line=getattr(error, "lineno", None) or 1,
            error=getattr(error, "msg", error),
            hint="repair it, leave it out, or give its plain text as .txt",
        ) from error
    encoding = (parsed.root.getroottree().docinfo.encoding or "utf-8").lower()
    return (encoding, list(filter(None, texts))) if _name(parsed.root) in ROOTS else None


def _name(element: Any) -> str:
    """The element's name without namespace; "" for comments, processing instructions and entities."""
    return element.tag.rpartition("}")[2].rpartition(":")[2] if isinstance(element.tag, str) else ""


def _text(body: Any) -> str:
    text = _MARKS.sub("", "".join(_pieces(body)).translate(_LAYOUT))
    return _GAPS.sub(_gap, text).strip()


def _gap(found: re.Match[str]) -> str:
    return "\n\n" if _PARAGRAPH in found[0] else "\n" if _LINE in found[0] else " "


def _pieces(element: Any) -> Iterator[str]:
    name = _name(element)
    gap = _SPACE.get(name, "")
    if element.get("break") != "no":
        yield gap
    yield element.text or ""
    for child in element:
        inner = _name(child)
        if not inner and str(child.text).startswith("&"):
            yield html.unescape(child.text)
        elif inner == "ref" and child.get("target", "").startswith("#"):
            yield _MARK
        elif inner and inner not in _LEFT_OUT and not (name == "choice" and inner in _OTHER_READING):
            yield from _pieces(child)
        yield child.tail or ""
    if name != "lb":
        yield gap
