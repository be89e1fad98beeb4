"""The notation of the grammar's sentences. They are compiled to pieces that generator, checker and tests share.

| written | means |
|---|---|
| `{h}` `{w.effect}` | the word for variable h; the part "effect" of variable w |
| `{o:lo}` | the paradigm of `PARADIGMS` (lo, la, los, las) in the gender and number of o |
| `{h/contento/contenta}` | the form in the gender of h |
| `{o+estaba+estaban}` | the form in the number of o |
| `{h&f/amigos/amigas}` | feminine only if both are |
| `{c@o}` | adjective c in the gender and number of o |
| `<close>` | one of the alternatives of a rule |

Invariant: `realise` is a pure function of the piece and the bindings, so the checker reads what the generator writes
(`test_checker_accepts_every_generated_story`).
"""

import re
from dataclasses import dataclass
from functools import cache

from cuadrilla.data.cuentos.lexicon import Bindings, Entry

Forms = tuple[str, str, str, str]  # masculine, feminine, masculine plural, feminine plural

PARADIGMS: dict[str, Forms] = {
    "el": ("el", "la", "los", "las"),
    "El": ("El", "La", "Los", "Las"),
    "un": ("un", "una", "unos", "unas"),
    "al": ("al", "a la", "a los", "a las"),
    "del": ("del", "de la", "de los", "de las"),
    "lo": ("lo", "la", "los", "las"),
    "Lo": ("Lo", "La", "Los", "Las"),
    "su": ("su", "su", "sus", "sus"),
    "mi": ("mi", "mi", "mis", "mis"),
    "tu": ("tu", "tu", "tus", "tus"),
    "mío": ("mío", "mía", "míos", "mías"),
    "bonito": ("bonito", "bonita", "bonitos", "bonitas"),
}
_CLITICS = frozenset({"lo", "Lo"})


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    rule: str


@dataclass(frozen=True, slots=True)
class Mention:
    variable: str
    part: str


@dataclass(frozen=True, slots=True)
class Agreement:
    variables: tuple[str, ...]
    forms: Forms
    is_clitic: bool = False


@dataclass(frozen=True, slots=True)
class Adjective:
    variable: str
    noun: str


Slot = Mention | Agreement | Adjective
Piece = Text | Choice | Slot

_TOKEN = re.compile(r"\{([^}]+)\}|<(\w+)>")


@cache
def compile_template(template: str) -> tuple[Piece, ...]:
    """The pieces of one sentence or paragraph, with no empty text among them."""
    pieces: list[Piece] = []
    end = 0
    for token in _TOKEN.finditer(template):
        if token.start() > end:
            pieces.append(Text(template[end : token.start()]))
        pieces.append(Choice(token[2]) if token[2] else _slot(token[1]))
        end = token.end()
    if end < len(template):
        pieces.append(Text(template[end:]))
    return tuple(pieces)


def _slot(body: str) -> Slot:
    if "@" in body:
        adjective, noun = body.split("@")
        return Adjective(adjective, noun)
    if "/" in body:
        names, masculine, feminine = body.split("/")
        return Agreement(tuple(names.split("&")), (masculine, feminine, masculine, feminine))
    if "+" in body:
        name, singular, plural = body.split("+")
        return Agreement((name,), (singular, singular, plural, plural))
    if ":" in body:
        name, paradigm = body.split(":")
        return Agreement((name,), PARADIGMS[paradigm], is_clitic=paradigm in _CLITICS)
    name, _, part = body.partition(".")
    return Mention(name, part or "word")


def variables_of(slot: Slot) -> tuple[str, ...]:
    """The variables a slot needs, the noun before the adjective."""
    match slot:
        case Mention(variable=variable):
            return (variable,)
        case Agreement(variables=variables):
            return variables
        case Adjective(variable=variable, noun=noun):
            return (noun, variable)


def form_index(entries: tuple[Entry, ...]) -> int:
    """Index, in a `Forms`, of the form that agrees with all these entries."""
    feminine = all(entry.gender == "f" for entry in entries)
    plural = entries[0].plural
    return feminine + 2 * plural


def realise(slot: Slot, bound: Bindings) -> str:
    """The text of a slot whose variables are all bound."""
    match slot:
        case Mention(variable=variable, part=part):
            return render(compile_template(bound[variable].parts[part]), bound)
        case Agreement(variables=variables, forms=forms):
            return forms[form_index(tuple(bound[name] for name in variables))]
        case Adjective(variable=variable, noun=noun):
            adjective_forms = bound[variable].forms
            assert adjective_forms is not None, f"{variable} is not an adjective"
            return adjective_forms[form_index((bound[noun],))]


def render(pieces: tuple[Piece, ...], bound: Bindings) -> str:
    """The text of pieces that have no choices and whose variables are all bound."""
    if len(pieces) == 1 and isinstance(pieces[0], Text):
        return pieces[0].text
    texts = []
    for piece in pieces:
        assert not isinstance(piece, Choice), "a reading cannot contain a choice"
        texts.append(piece.text if isinstance(piece, Text) else realise(piece, bound))
    return "".join(texts)
