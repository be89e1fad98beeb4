"""TEI-XML: what a reader of the book reads, without header, notes, front and back matter.

Everything inside `<body>` is text but the elements in `_LEFT_OUT`, the marks that refer to notes
(`<ref target="#n1">[1]</ref>`), and of a `<choice>` the corrected, regularised or expanded reading. Paragraphs, heads
and groups of verses are set apart by a blank line, verses and line breaks by a line end; other white space is layout. A
`<quote>` inside a paragraph is a part of it. Each outermost `<body>` is a text of its own. (TEI P5 Guidelines, chapters
3-7; P4 uses the same names.)

lxml holds one `<body>` at a time, within the limits of libxml2 (`huge_tree=False`: 10 MB of text without a tag, nesting
of 256). An internal DTD is refused, so that there are no entities to expand. Nothing outside the file is ever opened;
the named characters of HTML (`&ntilde;`) are known without a DTD's help.
"""

import re
from html.entities import html5
from typing import IO, Any, NamedTuple

from cuadrilla.data.formats.packing import INSTALL
from cuadrilla.data.formats.record import BadFileError
from cuadrilla.errors import EnvironmentProblem
from cuadrilla.messages import Message

ROOTS = ("TEI", "TEI.2", "teiCorpus", "teiCorpus.2")

_LEFT_OUT = {"note", "noteGrp", "teiHeader", "front", "back", "figDesc", "fw", "del", "index"}
_OTHER_READING = {"sic", "orig", "abbr"}
_PARAGRAPHS = {
    *("p", "ab", "head", "lg", "sp", "quote", "list", "table", "figure", "epigraph", "argument", "trailer"),
    *("opener", "closer", "postscript", "floatingText", "body"),
}
_LINES = {"l", "lb", "item", "row", "speaker", "stage", "salute", "signed", "dateline", "byline", "label"}
_HOLD_QUOTES = {"p", "ab", "head", "l", "item", "cell"}
_MARK = re.compile(r"[(\[]?(\d{1,4}|\*{1,4}|[a-z])[)\]]?")
_FOLLOWS_CLOSELY = tuple(",.;:)]!?»")
_LAYOUT = ("\n", "\t", "\r")


class Novel(NamedTuple):
    """What an XML file holds."""

    is_tei: bool
    encoding: str
    licence: str
    """The first address in its `<availability>`: that of a `<licence>`, or in older files of a `<ref>`."""
    texts: list[str]
    """That of each outermost `<body>` that is not empty."""


def read(stream: IO[bytes], *, where: str) -> Novel:
    """Read the file to its end. Raises BadFileError for what is not well-formed or is refused."""
    try:
        from lxml import etree
    except ImportError as error:
        raise EnvironmentProblem("reading .xml needs lxml, which is not installed", hint=INSTALL) from error
    texts: list[str] = []
    licence = "unknown"
    parsed = etree.iterparse(stream, resolve_entities=False, no_network=True, huge_tree=False)
    try:
        for _, element in parsed:
            name = _name(element)
            if name == "availability" and licence == "unknown":
                licence = _licence(element)
            elif name == "body" and _LEFT_OUT.union(["body"]).isdisjoint(map(_name, element.iterancestors())):
                _check_dtd(element.getroottree().docinfo.internalDTD, where)
                texts.append("".join(_Body(element, where).pieces))
                element.clear(keep_tail=True)
    except etree.XMLSyntaxError as error:
        why = Message("not well-formed XML: {error}", error=error.msg)
        raise _refusal(where, error.lineno or 1, why) from error
    except LookupError as error:
        raise _refusal(where, 1, Message("not well-formed XML: {error}", error=error)) from error
    info = parsed.root.getroottree().docinfo
    _check_dtd(info.internalDTD, where)
    return Novel(
        is_tei=_name(parsed.root) in ROOTS,
        encoding=(info.encoding or "utf-8").lower()[:40],
        licence=licence,
        texts=list(filter(None, texts)),
    )


def _name(element: Any) -> str:
    """Without its namespace; "" for comments, instructions and entities."""
    return element.tag.rpartition("}")[2].rpartition(":")[2] if isinstance(element.tag, str) else ""


def _licence(availability: Any) -> str:
    targets = (each.get("target") for each in availability.iter() if _name(each) in ("licence", "ref"))
    return " ".join(next(filter(None, targets), "unknown").split())[:200]


def _check_dtd(dtd: Any, where: str) -> None:
    if dtd is not None and any((*dtd.iterentities(), *dtd.iterelements())):
        raise _refusal(
            where, 1, Message("it defines its own entities or elements (<!DOCTYPE ... [ ]>), which is not read")
        )


def _refusal(where: str, line: int, why: Message) -> BadFileError:
    return BadFileError(
        "{where}:{line}: {why}",
        where=where,
        line=line,
        why=why,
        hint="repair it or give its plain text as .txt; --skip-bad leaves out, counts and names such files",
    )


class _Body:
    """One body, as `pieces` of text."""

    def __init__(self, body: Any, where: str) -> None:
        self.pieces: list[str] = []
        self._where = where
        self._gap = ""
        """White space before the next text."""
        self._was_mark = False
        """The last thing was the mark of a note."""
        self._read(body, is_in_paragraph=False)

    def _read(self, element: Any, *, is_in_paragraph: bool) -> None:
        name = _name(element)
        is_in_paragraph = is_in_paragraph or name in _HOLD_QUOTES
        gap = "" if name == "quote" and is_in_paragraph else _gap_of(name)
        if name != "lb" or element.get("break") != "no":
            self._widen(gap)
        self._write(element.text)
        for child in element:
            inner = _name(child)
            if not inner:
                self._entity(child)
            elif inner == "ref" and _is_mark(child):
                self._was_mark = True
            elif inner not in _LEFT_OUT and not (name == "choice" and inner in _OTHER_READING):
                self._read(child, is_in_paragraph=is_in_paragraph)
            self._write(child.tail)
        if name != "lb":
            self._widen(gap)

    def _widen(self, gap: str) -> None:
        if (gap.count("\n"), gap) > (self._gap.count("\n"), self._gap):
            self._gap = gap

    def _write(self, data: str | None) -> None:
        text = _without_layout(data or "")
        if text.startswith(" "):
            self._widen(" ")
        if body := text.strip(" "):
            if self._was_mark and self._gap == " " and body.startswith(_FOLLOWS_CLOSELY):
                self._gap = ""
            self._was_mark = False
            self.pieces.append(self._gap + body if self.pieces else body)
            self._gap = " " if text.endswith(" ") else ""

    def _entity(self, node: Any) -> None:
        """A reference to an entity that only an external DTD would define; comments and instructions are nothing."""
        name = getattr(node, "name", None)
        if name is None or not str(node.text).startswith("&"):
            return
        if f"{name};" not in html5:
            why = Message("&{name}; is defined in another file, which is not read", name=name[:40])
            raise _refusal(self._where, node.sourceline or 1, why)
        self._write(html5[f"{name};"])


def _is_mark(reference: Any) -> bool:
    said = "".join(reference.itertext()) if reference.get("target", "").startswith("#") else ""
    return _MARK.fullmatch(said.strip()) is not None


def _gap_of(name: str) -> str:
    """White space around an element."""
    if name in _PARAGRAPHS or name.startswith("div"):
        return "\n\n"
    return "\n" if name in _LINES else " " if name == "cell" else ""


def _without_layout(data: str) -> str:
    """Each run of white space as one blank. (On long lines a regular expression takes several times as long.)"""
    for character in _LAYOUT:
        data = data.replace(character, " ")
    while "  " in data:
        data = data.replace("  ", " ")
    return data
