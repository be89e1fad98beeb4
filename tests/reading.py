"""Reads files as a preparation does."""

from collections import deque
from pathlib import Path

from cuadrilla.data.sources import DEFAULT_FIELD, Sources, list_sources


def find(*specs: object, exclude: Path = Path("nowhere"), field: str = DEFAULT_FIELD) -> Sources:
    """Read all texts of these sources, and return the sources with the counts that are known then."""
    sources = list_sources([str(spec) for spec in specs], exclude=exclude, field=field)
    for text in sources.texts():
        deque(text.pieces, maxlen=0)
    return sources


def texts(*specs: object, field: str = DEFAULT_FIELD) -> list[str]:
    return [text for each in by_name(*specs, field=field).values() for text in each]


def by_name(*specs: object, field: str = DEFAULT_FIELD) -> dict[str, list[str]]:
    """The texts of each source, by its name."""
    sources = list_sources([str(spec) for spec in specs], exclude=Path("nowhere"), field=field)
    found: dict[str, list[str]] = {}
    for text in sources.texts():
        found.setdefault(sources.all[text.source].name, []).append("".join(text.pieces))
    return found
