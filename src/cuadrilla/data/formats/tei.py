"""TEI-XML: what a reader of the book reads, without header, notes, front and back matter.

Everything inside `<body>` is text but the elements in `_LEFT_OUT`, the marks that refer to notes
(`<ref target="#n1">[1]</ref>`), and of a `<choice>` the corrected, regularised or expanded reading. Paragraphs, heads
and groups of verses are set apart by a blank line, verses and line breaks by a line end; other white space is layout. A
`<quote>` inside a paragraph is a part of it. Each outermost `<body>` is a text of its own. (TEI P5 Guidelines, chapters
3-7; P4 uses the same names.)

What is refused: an internal DTD, so that there are no entities to expand; nesting beyond `MAX_DEPTH`, more than
`MAX_NAMES` different names, and one tag or comment beyond `MAX_MARKUP_BYTES`, because expat holds these in memory.
Nothing outside the file is ever opened; the named characters of HTML (`&ntilde;`) are known without a DTD's help.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from html.entities import html5
from xml.parsers import expat

from cuadrilla.data.formats.record import BadFileError
from cuadrilla.messages import Message

MAX_DEPTH = 1_000
MAX_NAMES = 10_000
MAX_MARKUP_BYTES = 2**22
ROOTS = ("TEI", "TEI.2", "teiCorpus", "teiCorpus.2")

_STEP_BYTES = 2**16
_LEFT_OUT = {"note", "noteGrp", "teiHeader", "front", "back", "figDesc", "fw", "del", "index"}
_OTHER_READING = {"sic", "orig", "abbr"}
_PARAGRAPHS = {
    *("p", "ab", "head", "lg", "sp", "quote", "list", "table", "figure", "epigraph", "argument", "trailer"),
    *("opener", "closer", "postscript", "floatingText", "body"),
}
_LINES = {"l", "lb", "item", "row", "speaker", "stage", "salute", "signed", "dateline", "byline", "label"}
_HOLD_QUOTES = {"p", "ab", "head", "l", "item", "cell"}
_MARK = re.compile(r"[(\[]?(\d{1,4}|\*{1,4}|[a-z])[)\]]?")
_MARK_CHARACTERS = 8
_FOLLOWS_CLOSELY = tuple(",.;:)]!?»")
_LAYOUT = ("\n", "\t", "\r")

Piece = tuple[int, str]
"""(number of its `<body>`, text)"""


@dataclass
class Header:
    """What a file says about itself."""

    root: str = ""
    """The outermost element; TEI if it is one of `ROOTS`."""
    encoding: str = "utf-8"
    licence: str = "unknown"
    """The first address in its `<availability>`: that of a `<licence>`, or in older files of a `<ref>`."""
    num_bytes: int = 0
    """Of text."""


def survey(chunks: Iterable[bytes], *, where: str) -> Header:
    """Read the file to its end. Raises BadFileError for what is not well-formed or is refused."""
    reader = _Reader(where)
    num_bytes = sum(len(text.encode()) for _, text in reader.pieces(chunks))
    return replace(reader.header, num_bytes=num_bytes)


def texts(chunks: Iterable[bytes], *, where: str) -> Iterator[Iterator[str]]:
    """The text of each `<body>`, in pieces."""
    for _, pieces in itertools.groupby(_Reader(where).pieces(chunks), key=lambda piece: piece[0]):
        yield (text for _, text in pieces)


@dataclass
class _Place:
    """Where in the document the parser is."""

    stack: list[str] = field(default_factory=list)
    body: int = 0
    """The number of the current outermost `<body>`, from 1; 0 outside."""
    body_depth: int = 0
    left_out_depth: int = 0
    """The depth of the outermost element that is left out, 0 outside of one."""
    mark_depth: int = 0
    """The depth of a reference that may be the mark of a note, 0 outside of one."""


class _Reader:
    """Handlers of expat that turn one document into pieces."""

    def __init__(self, where: str) -> None:
        self.header = Header()
        self._where = where
        self._place = _Place()
        self._num_bodies = 0
        self._gap = ""
        self._has_text = False
        self._mark: str | None = None
        """What a reference has said so far; None outside of one."""
        self._was_mark = False
        self._pieces: list[Piece] = []
        self._quiet_bytes = 0
        self._names: dict[str, str] = {}
        parser = expat.ParserCreate(intern=self._names)
        parser.buffer_text = True
        parser.buffer_size = _STEP_BYTES
        parser.XmlDeclHandler = self._declaration
        parser.StartDoctypeDeclHandler = self._doctype
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.SkippedEntityHandler = self._entity
        parser.DefaultHandler = self._other
        self._parser = parser

    def pieces(self, chunks: Iterable[bytes]) -> Iterator[Piece]:
        """The text of all bodies, as far as it goes with each chunk."""
        for chunk in chunks:
            for start in range(0, len(chunk), _STEP_BYTES):
                self._parse(chunk[start : start + _STEP_BYTES])
                yield from self._pieces
                self._pieces.clear()
        self._parse(b"", final=True)
        yield from self._pieces

    def _parse(self, data: bytes, *, final: bool = False) -> None:
        self._quiet_bytes += len(data)
        try:
            self._parser.Parse(data, final)
        except expat.ExpatError as error:
            raise self._refusal(Message("not well-formed XML: {error}", error=expat.ErrorString(error.code))) from error
        except (LookupError, ValueError) as error:  # an encoding that Python does not know, or cannot use here
            raise self._refusal(Message("its encoding cannot be read: {error}", error=error)) from error
        if self._quiet_bytes > MAX_MARKUP_BYTES:
            raise self._refusal(Message("one tag or comment of more than {most:,} bytes", most=MAX_MARKUP_BYTES))
        if len(self._names) > MAX_NAMES:
            raise self._refusal(
                Message("more than {most:,} different names of elements and attributes", most=MAX_NAMES)
            )

    def _refusal(self, why: str) -> BadFileError:
        return BadFileError(
            "{where}:{line}: {why}",
            where=self._where,
            line=self._parser.CurrentLineNumber,
            why=why,
            hint="repair it or give its plain text as .txt; --skip-bad leaves out, counts and names such files",
        )

    def _declaration(self, _version: str, encoding: str | None, _standalone: int) -> None:
        self._quiet_bytes = 0
        self.header.encoding = (encoding or "utf-8").lower()[:40]

    def _doctype(self, _name: str, _system: str | None, _public: str | None, has_internal_subset: int) -> None:
        self._quiet_bytes = 0
        if has_internal_subset:
            raise self._refusal(
                Message("it defines its own entities or elements (<!DOCTYPE ... [ ]>), which is not read")
            )

    def _start(self, raw_name: str, attributes: dict[str, str]) -> None:
        self._quiet_bytes = 0
        place = self._place
        name = raw_name.rpartition(":")[2]
        parent = place.stack[-1] if place.stack else ""
        place.stack.append(name)
        depth = len(place.stack)
        if depth > MAX_DEPTH:
            raise self._refusal(Message("elements nested more than {most:,} deep", most=MAX_DEPTH))
        if depth == 1:
            self.header.root = name
        if name in ("licence", "ref") and "availability" in place.stack and self.header.licence == "unknown":
            self.header.licence = " ".join(attributes.get("target", "unknown").split())[:200]
        if not place.left_out_depth and (name in _LEFT_OUT or (parent == "choice" and name in _OTHER_READING)):
            place.left_out_depth = depth
        if name == "body" and not place.body and not place.left_out_depth:
            self._num_bodies += 1
            place.body, place.body_depth = self._num_bodies, depth
            self._gap, self._has_text = "", False
        if name == "ref" and attributes.get("target", "").startswith("#") and self._mark is None:
            place.mark_depth, self._mark = depth, ""
        if name != "lb" or attributes.get("break") != "no":
            self._set_apart(name)

    def _end(self, raw_name: str) -> None:
        self._quiet_bytes = 0
        place = self._place
        name = raw_name.rpartition(":")[2]
        if name != "lb":
            self._set_apart(name)
        depth = len(place.stack)
        if depth == place.mark_depth:
            self._end_reference()
        if depth == place.left_out_depth:
            place.left_out_depth = 0
        if depth == place.body_depth:
            place.body = place.body_depth = 0
        place.stack.pop()

    def _end_reference(self) -> None:
        """The mark of a note is no text; what else a reference says is."""
        said, self._mark, self._place.mark_depth = self._mark or "", None, 0
        if _MARK.fullmatch(said.strip()):
            self._was_mark = True
        elif said:
            self._characters(said)

    def _set_apart(self, name: str) -> None:
        """An element that begins or ends here is a gap before the next text; the widest one counts."""
        if name == "quote" and not _HOLD_QUOTES.isdisjoint(self._place.stack):
            gap = ""
        elif name in _PARAGRAPHS or name.startswith("div"):
            gap = "\n\n"
        elif name in _LINES:
            gap = "\n"
        else:
            gap = " " if name == "cell" else ""
        if not self._place.left_out_depth:
            self._widen(gap)

    def _widen(self, gap: str) -> None:
        if (gap.count("\n"), gap) > (self._gap.count("\n"), self._gap):
            self._gap = gap

    def _characters(self, data: str) -> None:
        self._quiet_bytes = 0
        place = self._place
        if not place.body or place.left_out_depth:
            return
        text = _without_layout(data)
        if self._mark is not None and len(self._mark) + len(text) <= _MARK_CHARACTERS:
            self._mark += text
            return
        if self._mark:
            text, self._mark = self._mark + text, None
        if text.startswith(" "):
            self._widen(" ")
        if body := text.strip(" "):
            if self._was_mark and self._gap == " " and body.startswith(_FOLLOWS_CLOSELY):
                self._gap = ""
            self._was_mark = False
            self._pieces.append((place.body, self._gap + body if self._has_text else body))
            self._gap, self._has_text = "", True
            if text.endswith(" "):
                self._widen(" ")

    def _entity(self, name: str, is_parameter: bool) -> None:
        """A reference to an entity that only an external DTD would define."""
        self._quiet_bytes = 0
        if is_parameter:
            return
        if f"{name};" not in html5:
            raise self._refusal(Message("&{name}; is defined in another file, which is not read", name=name[:40]))
        self._characters(html5[f"{name};"])

    def _other(self, _data: str) -> None:
        """Comments and the like: seen, so that a long one can be told from an endless one."""
        self._quiet_bytes = 0


def _without_layout(data: str) -> str:
    """Each run of white space as one blank. (On long lines a regular expression takes several times as long.)"""
    for character in _LAYOUT:
        data = data.replace(character, " ")
    while "  " in data:
        data = data.replace("  ", " ")
    return data
