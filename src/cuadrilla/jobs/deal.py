"""Which of the runs that wait begins next, and with what: one place, or several whole machines. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cuadrilla.link.names import node_of

DEVICES = ("cuda", "mps", "xpu", "cpu")


@dataclass(frozen=True, kw_only=True)
class Wants:
    """`machines`: how many train it together. `on`: names of those that may; empty: any. `device`: one of `DEVICES`
    that each has to have; empty: whatever it has."""

    machines: int = 1
    on: tuple[str, ...] = ()
    device: str = ""


ANY = Wants()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A machine. `devices`: of which kind each of its places is; `free`: those that have nothing to do."""

    name: str
    devices: Mapping[str, str]
    free: Collection[str]


def deal(waiting: Sequence[Wants], machines: Sequence[Candidate]) -> tuple[int, tuple[str, ...]] | None:
    """The number of the first run that can begin, and the places that it gets; None if there is none.

    A run of several machines gets them whole. They are kept for it, before any run behind it, as they become free: if
    enough of them are there.
    """
    kept: set[str] = set()
    for number, wants in enumerate(waiting):
        there = [machine for machine in machines if machine.name not in kept]
        if wants.machines == 1:
            places = [place for machine in there for place in _places(wants, machine) if place in machine.free]
            if places:
                return number, (places[0],)
            continue
        able = [machine for machine in there if _places(wants, machine)]
        whole = [machine for machine in able if len(machine.free) == len(machine.devices)]
        if len(whole) >= wants.machines:
            return number, tuple(place for machine in whole[: wants.machines] for place in machine.devices)
        if len(able) >= wants.machines:
            kept.update(machine.name for machine in able)
    return None


def suits(wants: Wants, *, place: str, device: str) -> bool:
    """Whether a job may be done there: at a place of that name, or of a machine of that name."""
    named = not wants.on or not {place, node_of(place)}.isdisjoint(wants.on)
    return named and wants.device in ("", device)


def lacking(wants: Wants, machines: Sequence[Candidate]) -> int:
    """How many machines have still to join before such a run can begin."""
    return max(0, wants.machines - sum(bool(_places(wants, machine)) for machine in machines))


def _places(wants: Wants, machine: Candidate) -> list[str]:
    """Those that the run may have."""
    named = [place for place in machine.devices if not wants.on or not {machine.name, place}.isdisjoint(wants.on)]
    return [place for place in named if wants.device in ("", machine.devices[place])]
