"""The words of `cuentos`: people, places, things, and causes with their effects.

An entry is one value that a story can bind to a variable: a person, a toy, a place, or a whole cause with its effect.
Invariants: in each field, no two entries of a variable have the
same text, and none is the beginning of another. So a text determines its bindings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Gender = Literal["m", "f"]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """`parts`: the entry's texts by name ("word" for `{o}`). `forms`: an adjective's four forms (m, f, ms, fs)."""

    parts: Mapping[str, str] = field(default_factory=dict)
    gender: Gender = "m"
    plural: bool = False
    forms: tuple[str, str, str, str] | None = None


def _nouns(words: str, *, gender: Gender, plural: bool = False) -> tuple[Entry, ...]:
    return tuple(Entry(parts={"word": word}, gender=gender, plural=plural) for word in words.split())


def _people(full_names: str, *, gender: Gender) -> tuple[Entry, ...]:
    pairs = (full_name.split() for full_name in full_names.split(", "))
    return tuple(Entry(parts={"word": word, "surname": surname}, gender=gender) for word, surname in pairs)


def _things(names: str, *, gender: Gender, plural: bool = False) -> tuple[Entry, ...]:
    """Toys or animals, each with a phrase of its own (made of, for or like what), as children have surnames."""
    pairs = (name.split(" ", 1) for name in names.split(", "))
    return tuple(Entry(parts={"word": word, "kind": kind}, gender=gender, plural=plural) for word, kind in pairs)


def _phrases(*texts: str) -> tuple[Entry, ...]:
    return tuple(Entry(parts={"word": text}) for text in texts)


def _causes(names: str, *rows: str) -> tuple[Entry, ...]:
    """An entry for each row. Its texts, which ` | ` separates, have these names."""
    texts = (row.split(" | ") for row in rows)
    return tuple(Entry(parts=dict(zip(names.split(), each, strict=True))) for each in texts)


def _adjectives(words: str) -> tuple[Entry, ...]:
    """Four forms from the masculine singular: -o changes with gender, a vowel takes -s, a consonant takes -es."""
    entries = []
    for word in words.split():
        feminine = word[:-1] + "a" if word.endswith("o") else word
        ending = "s" if word[-1] in "aeo" else "es"
        entries.append(Entry(forms=(word, feminine, word + ending, feminine + ending)))
    return tuple(entries)


# Each child has one surname. A small model learns early which two words always go together, and so tells names apart.
# Without surnames it knows for millions of tokens that a name must follow, but not which one.
PEOPLE = _people("Pablo Vega, Hugo Molina, Diego Soto, Leo Campos", gender="m") + _people(
    "Lucía Rivera, Marta Serrano, Elena Prado, Sofía Navarro", gender="f"
)
FAMILY = _nouns("abuelo tío", gender="m") + _nouns("abuela tía", gender="f")
TOYS = (
    _things("globo de feria, tren de madera, barco de vela, tambor de lata", gender="m")
    + _things("cometa de papel, pelota de goma, flauta de caña, muñeca de trapo", gender="f")
    + _things("guantes de lana, patines de hielo", gender="m", plural=True)
    + _things("botas de agua, gafas de sol", gender="f", plural=True)
)
FRAGILE = _nouns("jarrón plato espejo", gender="m") + _nouns("taza jarra lámpara", gender="f")
ANIMALS = _things("gato de ojos verdes, perro de orejas largas, conejo de cola corta", gender="m") + _things(
    "oveja de lana blanca, cabra de patas negras, tortuga de paso lento", gender="f"
)
PETS = _nouns("Coco Pipo Rayo", gender="m") + _nouns("Luna Nube Perla", gender="f")
PLACES = _nouns("parque bosque río", gender="m") + _nouns("playa plaza granja", gender="f")
GARDENS = _nouns("jardín patio huerto", gender="m")

COLOURS = _adjectives("rojo amarillo blanco azul")
QUALITIES = _adjectives("curioso listo alegre valiente")

TIMES = _phrases("Un día", "Una mañana", "Una tarde", "Un sábado", "Un domingo")
HIDEOUTS = _phrases("detrás de un árbol", "debajo de un banco", "junto a una piedra", "al lado del camino")

# What happens, what it does to the child, what the child says, the one thing that helps (twice), and how it ends.
TROUBLES = _causes(
    "cause effect say thing the result",
    "empezó a llover | se mojó los pies | ¡Tengo los pies mojados! | un paraguas | el paraguas | dejó de mojarse",
    "empezó a nevar | se puso a temblar | ¡Tengo mucho frío! | una manta | la manta | dejó de temblar",
    "empezó a hacer mucho calor | notó la boca seca | ¡Tengo mucha sed! | "
    "una botella de agua | la botella de agua | dejó de tener sed",
    "{h} tropezó con una piedra | se hizo daño en la rodilla | ¡Me duele la rodilla! | "
    "una venda | la venda | pudo caminar otra vez",
    "llegó la hora de comer | notó la barriga vacía | ¡Tengo mucha hambre! | "
    "un bocadillo | el bocadillo | dejó de tener hambre",
)

# What is wrong with an animal, what the child promises, brings and does.
RESCUES = _causes(
    "problem say thing action",
    "tenía mucha hambre | ¡Voy a darte de comer! | un trozo de pan | Le dio el pan y {a:el} {a} comió con ganas",
    "tenía mucha sed | ¡Voy a darte de beber! | un plato de agua | Le dio el agua y {a:el} {a} bebió con ganas",
    "temblaba de frío | ¡Voy a darte calor! | una manta | {a:Lo} tapó con la manta y {a:el} {a} dejó de temblar",
    "tenía una pata herida | ¡Voy a curarte! | una venda | Le puso la venda y {a:el} {a} pudo caminar otra vez",
)

# A tree and its fruit; gender and number are the fruit's.
TREES = (
    Entry(parts={"tree": "manzano", "fruit": "manzanas"}, gender="f", plural=True),
    Entry(parts={"tree": "peral", "fruit": "peras"}, gender="f", plural=True),
    Entry(parts={"tree": "naranjo", "fruit": "naranjas"}, gender="f", plural=True),
    Entry(parts={"tree": "limonero", "fruit": "limones"}, gender="m", plural=True),
)

VARIABLES: Mapping[str, tuple[Entry, ...]] = {
    "h": PEOPLE,
    "f": PEOPLE,
    "k": FAMILY,
    "o": TOYS,
    "b": FRAGILE,
    "a": ANIMALS,
    "n": PETS,
    "p": PLACES,
    "j": GARDENS,
    "c": COLOURS,
    "q": QUALITIES,
    "t": TIMES,
    "s": HIDEOUTS,
    "w": TROUBLES,
    "x": RESCUES,
    "v": TREES,
}
# The kind of fault when a later mention does not match the first one.
MENTION_KINDS: Mapping[str, str] = (
    dict.fromkeys("hfkn", "character") | dict.fromkeys("obac", "object") | dict.fromkeys("wxv", "cause")
)

_PETS_BY_GENDER = {gender: tuple(pet for pet in PETS if pet.gender == gender) for gender in ("m", "f")}
# The cast is fixed: each child has one friend who is a boy and one who is a girl, never itself, and one relative.
_BOYS, _GIRLS = PEOPLE[:4], PEOPLE[4:]
_FRIENDS = {boy: (_BOYS[place - 1], _GIRLS[place]) for place, boy in enumerate(_BOYS)} | {
    girl: (_BOYS[place - 2], _GIRLS[place - 1]) for place, girl in enumerate(_GIRLS)
}
_RELATIVES = {child: (FAMILY[place % len(FAMILY)],) for place, child in enumerate(PEOPLE)}
Bindings = Mapping[str, Entry]


def candidates(variable: str, bound: Bindings) -> tuple[Entry, ...]:
    """The values that `variable` may have: the hero's own friends and relative, pet names of the animal's gender."""
    if variable == "f":
        return _FRIENDS[bound["h"]]
    if variable == "k":
        return _RELATIVES[bound["h"]]
    if variable == "n":
        return _PETS_BY_GENDER[bound["a"].gender]
    return VARIABLES[variable]
