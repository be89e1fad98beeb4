"""What nftables' own rules do with a new connection to a port, from `nft -j list ruleset`.

A packet that comes in passes every base chain of the hooks prerouting and input: each has to let it through. What is
judged is a TCP connection that another machine of this network begins, on the card with this machine's address. A rule
with a condition that is not understood (a mark, a rate, a matching of iptables) is passed over, as it is in
`network.judge`. Tables that other programs keep are those programs' to judge: iptables, firewalld.

Source: libnftables-json(5).
"""

import ipaddress
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOOKS = ("prerouting", "input")
OF_IPTABLES = ("filter", "nat", "mangle", "raw", "security")
OF_FIREWALLD = "firewalld"
HARMLESS = {"counter", "log", "mangle", "notrack"}
CLOSING = ("drop", "reject")
MOST_STEPS = 100_000
"""Of rules that are looked at: chains may lead to one another again and again."""
MOST_DEPTH = 16
"""The kernel's own."""

Chain = tuple[str, str, str]
"""Family, table and name."""


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """The connection that is judged. `address`: of this machine; `card`: by which it comes, "" where not known."""

    port: int
    address: str
    card: str = ""

    @property
    def family(self) -> str:
        return "ip6" if ":" in self.address else "ip"


@dataclass(frozen=True, kw_only=True)
class Closed:
    """Where it ends. `handle` 0: by the policy of `base`. `names_port`: the rule is about this port and no more."""

    base: Chain
    chain: Chain
    handle: int = 0
    names_port: bool = False

    def opens(self, port: int) -> str:
        """The command that lets the port in."""
        if self.names_port:
            return f"nft delete rule {shlex.join(self.chain)} handle {self.handle}"
        return f"nft insert rule {shlex.join(self.base)} tcp dport {port} accept"


@dataclass
class Ruleset:
    """All rules by chain, the base chains that a newcomer passes with their policy, and the elements of named sets."""

    rules: dict[Chain, list[Mapping[str, Any]]] = field(default_factory=dict)
    bases: dict[Chain, str] = field(default_factory=dict)
    sets: dict[Chain, Sequence[Any]] = field(default_factory=dict)


def parse_ruleset(text: str) -> Ruleset | None:
    """None for what is no ruleset. What of it is not understood is left out."""
    line = next((line for line in text.splitlines() if line.startswith("{")), "")
    try:
        rows = json.loads(line)["nftables"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    found = Ruleset()
    for row in rows if isinstance(rows, list) else []:
        for kind, told in row.items() if isinstance(row, Mapping) else ():
            if isinstance(told, Mapping):
                _take(found, kind, told)
    return found


def _take(found: Ruleset, kind: str, told: Mapping[str, Any]) -> None:
    family, table = str(told.get("family")), str(told.get("table"))
    here = (family, table, str(told.get("chain" if kind == "rule" else "name")))
    if kind == "rule" and isinstance(told.get("expr"), list):
        found.rules.setdefault(here, []).append(told)
    elif kind == "chain" and told.get("hook") in HOOKS and told.get("type") == "filter":
        found.bases[here] = str(told.get("policy", "accept"))
    elif kind in ("set", "map") and isinstance(told.get("elem"), list):
        found.sets[here] = told["elem"]


def closed_by(ruleset: Ruleset, newcomer: Newcomer, *, iptables: bool, firewalld: bool) -> Iterator[Closed]:
    """Each base chain that does not let it in. `iptables`, `firewalld`: who is asked about its own tables."""
    for base, policy in ruleset.bases.items():
        family, table, name = base
        if family not in (newcomer.family, "inet") or (firewalld and table == OF_FIREWALLD):
            continue
        if iptables and family != "inet" and table in OF_IPTABLES and name.isupper():
            continue
        walk = _Walk(ruleset, newcomer)
        verdict, rule, chain = walk.through(base, depth=0)
        if verdict in CLOSING and rule is not None:
            alone = names_only(rule, newcomer.port)
            yield Closed(base=base, chain=chain, handle=_handle(rule), names_port=alone)
        elif not verdict and policy == "drop" and walk.steps <= MOST_STEPS:
            yield Closed(base=base, chain=base)


def _handle(rule: Mapping[str, Any]) -> int:
    handle = rule.get("handle")
    return handle if isinstance(handle, int) else 0


def names_only(rule: Mapping[str, Any], port: int) -> bool:
    """Whether a rule says no more than that this port is closed, so that without it nothing else changes."""
    said = [each for each in rule["expr"] if isinstance(each, Mapping) and not each.keys() & HARMLESS]
    matches = [each["match"] for each in said if "match" in each]
    return (
        len(said) == 2
        and len(matches) == 1
        and isinstance(matches[0], Mapping)
        and matches[0].get("op") == "=="
        and matches[0].get("right") == port
        and _handle(rule) > 0
    )


@dataclass
class _Walk:
    """A newcomer's way through the chains."""

    ruleset: Ruleset
    newcomer: Newcomer
    steps: int = 0

    def through(self, chain: Chain, *, depth: int) -> tuple[str, Mapping[str, Any] | None, Chain]:
        """(verdict, the rule that gave it, its chain); "" where the chain ends without one."""
        for rule in self.ruleset.rules.get(chain, ()) if depth <= MOST_DEPTH else ():
            self.steps += 1
            if self.steps > MOST_STEPS:
                break
            verdict, target = self._of(rule["expr"], chain)
            if verdict in ("jump", "goto"):
                found = self.through((*chain[:2], target), depth=depth + 1)
                if found[0] or verdict == "goto":
                    return found
            elif verdict == "return":
                break
            elif verdict:
                return verdict, rule, chain
        return "", None, chain

    def _of(self, expressions: Sequence[Any], chain: Chain) -> tuple[str, str]:
        """(what a rule says of the newcomer, the chain that it leads to); "" for nothing."""
        for each in expressions:
            if not isinstance(each, Mapping) or len(each) != 1:
                return "", ""
            [(kind, told)] = each.items()
            if kind in HARMLESS:
                continue
            if kind == "match" and isinstance(told, Mapping):
                if self._holds(told.get("left"), str(told.get("op")), told.get("right"), chain) is not True:
                    return "", ""
            elif kind == "vmap" and isinstance(told, Mapping):
                return self._looked_up(told, chain)
            else:
                return _verdict(each)
        return "", ""

    def _looked_up(self, told: Mapping[str, Any], chain: Chain) -> tuple[str, str]:
        for pair in self._elements(told.get("data"), chain):
            if isinstance(pair, list) and len(pair) == 2 and self._holds(told.get("key"), "==", pair[0], chain):
                return _verdict(pair[1])
        return "", ""

    def _holds(self, left: Any, operator: str, right: Any, chain: Chain) -> bool | None:
        """None where it is not known."""
        mine = self._value(left)
        if mine is None:
            return None
        if operator in ("<", "<=", ">", ">="):
            return _compared(mine, operator, right)
        if operator not in ("==", "!=", "in"):
            return None
        answers = [_is(mine, element) for element in self._elements(right, chain)]
        found = True if True in answers else None if None in answers else False
        return found if operator != "!=" else None if found is None else not found

    def _elements(self, right: Any, chain: Chain) -> Sequence[Any]:
        if isinstance(right, str) and right.startswith("@"):
            return self.ruleset.sets.get((*chain[:2], right[1:]), (None,))
        if isinstance(right, Mapping) and isinstance(right.get("set"), list):
            elements: list[Any] = right["set"]
            return elements
        return right if isinstance(right, list) else [right]

    def _value(self, left: Any) -> Any:
        """What the newcomer has there: a text, a number, or an `_Network`; None where that is not known."""
        if not isinstance(left, Mapping) or len(left) != 1:
            return None
        [(kind, told)] = left.items()
        if not isinstance(told, Mapping):
            return None
        key = told.get("key") if kind in ("meta", "ct") else told.get("field")
        is_v6 = self.newcomer.family == "ip6"
        match kind, told.get("protocol"), key:
            case ("payload", "tcp" | "th", "dport"):
                return self.newcomer.port
            case ("payload", "udp" | "sctp" | "icmp" | "icmpv6", _):
                return _Nothing()
            case ("payload", "ip" | "ip6", "saddr"):
                return _Network(self.newcomer.address)
            case ("payload", "ip", "protocol") | ("payload", "ip6", "nexthdr") | ("meta", _, "l4proto"):
                return "tcp"
            case ("meta", _, "iifname" | "iif"):
                return self.newcomer.card or None
            case ("meta", _, "nfproto"):
                return "ipv6" if is_v6 else "ipv4"
            case ("ct", _, "state"):
                return "new"
        return None


@dataclass(frozen=True)
class _Network:
    """A machine somewhere on the network of this address: whether it is a certain one is not known."""

    address: str


class _Nothing:
    """Of another protocol: no rule about it is about the newcomer."""


def _verdict(said: Any) -> tuple[str, str]:
    """Of a statement; "" for one that decides nothing, or is not understood."""
    if not isinstance(said, Mapping) or len(said) != 1:
        return "", ""
    [(kind, told)] = said.items()
    if kind in ("accept", *CLOSING, "return"):
        return kind, ""
    if kind in ("jump", "goto") and isinstance(told, Mapping):
        return kind, str(told.get("target"))
    return "", ""


def _is(mine: Any, element: Any) -> bool | None:
    """Whether the newcomer's value is an element of a set."""
    if isinstance(element, Mapping) and isinstance(element.get("elem"), Mapping):
        element = element["elem"].get("val")
    if isinstance(mine, _Nothing):
        return False
    if element is None:
        return None
    if isinstance(mine, _Network):
        return True if _contains(element, mine.address) else None
    if isinstance(element, Mapping):
        bounds = element.get("range")
        if not isinstance(bounds, list) or len(bounds) != 2 or not isinstance(mine, int):
            return None
        return all(isinstance(bound, int) for bound in bounds) and bounds[0] <= mine <= bounds[1]
    if isinstance(element, str) and element.endswith("*") and isinstance(mine, str):
        return mine.startswith(element[:-1])
    if isinstance(mine, int) and not isinstance(element, int):
        return None  # a service by name
    return bool(mine == element or (mine == "tcp" and element == 6))


def _contains(element: Any, address: str) -> bool:
    """Whether it is a network with this address in it, and so with the machines around it."""
    prefix = element.get("prefix") if isinstance(element, Mapping) else None
    if not isinstance(prefix, Mapping):
        return False
    try:
        network = ipaddress.ip_network(f"{prefix.get('addr')}/{prefix.get('len')}", strict=False)
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False


def _compared(mine: Any, operator: str, right: Any) -> bool | None:
    if not isinstance(mine, int) or not isinstance(right, int):
        return None
    return {"<": mine < right, "<=": mine <= right, ">": mine > right, ">=": mine >= right}[operator]
