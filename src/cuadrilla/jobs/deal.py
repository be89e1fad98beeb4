"""The run that begins next, of those that wait, and its place. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cuadrilla.link.base import node_of

DEVICES = ("cuda", "mps", "xpu", "cpu")


@dataclass(frozen=True, kw_only=True)
class Wants:
    """`on`: names of machines, or of their places, that may train it; empty: any. `device`: one of `DEVICES` that the
    place has to have; empty: any."""

    on: tuple[str, ...] = ()
    device: str = ""


ANY = Wants()


def deal(waiting: Sequence[Wants], free: Iterable[str], *, devices: Mapping[str, str]) -> tuple[int, str] | None:
    """The number of the first run that can begin, and the free place that it gets; None if there is none.

    `devices`: the kind of each place.
    """
    there = list(free)
    for number, wants in enumerate(waiting):
        for place in there:
            if suits(wants, place=place, device=devices[place]):
                return number, place
    return None


def suits(wants: Wants, *, place: str, device: str) -> bool:
    """Whether a job may be done there: at a place of that name, or of a machine of that name."""
    named = not wants.on or not {place, node_of(place)}.isdisjoint(wants.on)
    return named and wants.device in ("", device)
