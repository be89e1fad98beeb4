"""What nftables' own rules do with a port, from what `nft -j list ruleset` prints: recorded with nftables 1.0.6."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cuadrilla.doctor.facts import Firewalls
from cuadrilla.doctor.nftables import MOST_STEPS, Newcomer, closed_by, parse_ruleset
from cuadrilla.doctor.programs import ProgramAnswer
from tests.patients import LINUX, PORT, only, said, sick

pytestmark = pytest.mark.unit

TABLE = {"family": "inet", "table": "mine"}
HERE = LINUX.address


def match(left: dict[str, Any], right: Any, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


DPORT = {"payload": {"protocol": "tcp", "field": "dport"}}
STATE = {"ct": {"key": "state"}}
NAME = {"meta": {"key": "iifname"}}
SOURCE = {"payload": {"protocol": "ip", "field": "saddr"}}
L4 = {"meta": {"key": "l4proto"}}
DROP, ACCEPT, REJECT = {"drop": None}, {"accept": None}, {"reject": {"type": "tcp reset"}}
COUNTER = {"counter": {"packets": 3, "bytes": 180}}
LAN = {"prefix": {"addr": HERE.rpartition(".")[0] + ".0", "len": 24}}


def ruleset(*rules: list[Any], policy: str = "accept", more: tuple[dict[str, Any], ...] = (), **base: Any) -> str:
    """A chain `incoming` with these rules, as nft prints it."""
    chain = {**TABLE, "name": "incoming", "handle": 1, "type": "filter", "hook": "input", "prio": 0, "policy": policy}
    rows: list[dict[str, Any]] = [
        {"metainfo": {"version": "1.0.6", "release_name": "Lester Gooch #5", "json_schema_version": 1}},
        {"table": {"family": "inet", "name": "mine", "handle": 1}},
        {"chain": {**chain, **base}},
        *more,
        *(rule_in("incoming", expressions, 10 + number) for number, expressions in enumerate(rules)),
    ]
    return json.dumps({"nftables": rows})


def rule_in(chain: str, expressions: list[Any], handle: int = 77) -> dict[str, Any]:
    return {"rule": {**TABLE, "chain": chain, "handle": handle, "expr": expressions}}


DELETE = "sudo nft delete rule inet mine incoming handle 10"
INSERT = f"sudo nft insert rule inet mine incoming tcp dport {PORT} accept"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (ruleset(), ""),
        (ruleset(policy="drop"), INSERT),
        (ruleset([match(DPORT, PORT), DROP]), DELETE),
        (ruleset([match(DPORT, PORT), COUNTER, REJECT]), DELETE),
        (ruleset([match(DPORT, PORT), ACCEPT], policy="drop"), ""),
        (ruleset([match(DPORT, {"set": [22, PORT]}), DROP]), INSERT),
        (ruleset([match(DPORT, {"range": [47000, 48000]}), DROP]), INSERT),
        (ruleset([match(DPORT, {"set": [22, {"range": [47000, 48000]}]}), ACCEPT], policy="drop"), ""),
        (ruleset([match(DPORT, 22), DROP]), ""),
        (ruleset([match(DPORT, PORT, "!="), DROP]), ""),
        (ruleset([match(DPORT, 1024, ">="), DROP]), INSERT),
        (ruleset([match(L4, "udp"), DROP]), ""),
        (ruleset([match(L4, "tcp"), DROP]), INSERT),
        (ruleset([match({"payload": {"protocol": "udp", "field": "dport"}}, PORT), DROP]), ""),
        (ruleset([match(STATE, ["established", "related"], "in"), ACCEPT],
                 [match(NAME, "lo"), ACCEPT], policy="drop"), INSERT),
        (ruleset([match(STATE, "new", "in"), match(DPORT, PORT), ACCEPT], policy="drop"), ""),
        (ruleset([match(STATE, ["invalid"], "in"), DROP]), ""),
        (ruleset([match(NAME, "lo", "!="), DROP]), INSERT),
        (ruleset([match(NAME, LINUX.cards[0].name), ACCEPT], policy="drop"), ""),
        (ruleset([match(NAME, "enp*"), ACCEPT], policy="drop"), ""),
        (ruleset([match(NAME, "wlan*"), ACCEPT], policy="drop"), INSERT),
        (ruleset([match(SOURCE, LAN), ACCEPT], policy="drop"), ""),
        (ruleset([match(SOURCE, LAN, "!="), DROP]), ""),
        (ruleset([match(SOURCE, "10.9.9.9"), DROP]), ""),  # one machine, perhaps none of the crew
        (ruleset([{"limit": {"rate": 3, "per": "second"}}, DROP]), ""),
        (ruleset([{"xt": None}, DROP]), ""),
        (ruleset([match({"meta": {"key": "mark"}}, 7), DROP]), ""),
        (ruleset([{"vmap": {"key": DPORT, "data": {"set": [[22, ACCEPT], [PORT, DROP]]}}}]), INSERT),
        (ruleset([{"vmap": {"key": STATE, "data": {"set": [["established", ACCEPT], ["invalid", DROP]]}}}]), ""),
        (ruleset([match(DPORT, PORT), DROP], hook="forward"), ""),
        (ruleset([match(DPORT, PORT), DROP], hook="prerouting"), DELETE),
        (ruleset([match(DPORT, PORT), DROP], family="ip6"), ""),
        (ruleset([match(DPORT, PORT), DROP], type="nat"), ""),
    ],
)  # fmt: skip
def test_a_newcomer_to_the_port(text: str, command: str) -> None:
    seen = replace(LINUX, port=PORT, firewalls=Firewalls(nft=said(text)))
    if command:
        found = only(seen, "network.firewall")
        assert (found.level, found.command, found.fixable) == ("failure", command, True)
        assert str(PORT) in found.cause
    else:
        assert sick(seen) == []
    assert sick(replace(seen, port=None)) == []


def test_chains_that_lead_to_others() -> None:
    there = {"chain": {**TABLE, "name": "there", "handle": 9}}
    jumps = [match(DPORT, {"range": [47000, 48000]}), {"jump": {"target": "there"}}]
    text = ruleset(jumps, more=(there, rule_in("there", [match(DPORT, PORT), DROP])))
    assert command_of(text) == "sudo nft delete rule inet mine there handle 77"
    text = ruleset(jumps, policy="drop", more=(there, rule_in("there", [{"return": None}]), rule_in("there", [ACCEPT])))
    assert command_of(text) == INSERT
    text = ruleset([{"goto": {"target": "there"}}], [DROP], more=(there,))
    assert command_of(text) == ""  # the chain that it went to ends with the policy


def command_of(text: str) -> str:
    seen = replace(LINUX, port=PORT, firewalls=Firewalls(nft=said(text)))
    return only(seen, "network.firewall").command if sick(seen) else ""


def test_named_sets() -> None:
    ports = {"set": {**TABLE, "name": "mine", "type": "inet_service", "handle": 3, "elem": [22, PORT]}}
    assert command_of(ruleset([match(DPORT, "@mine"), ACCEPT], policy="drop", more=(ports,))) == ""
    assert command_of(ruleset([match(DPORT, "@other"), DROP], more=(ports,))) == ""  # not known


def test_each_chain_has_to_let_it_in() -> None:
    early = {**TABLE, "name": "early", "type": "filter", "hook": "input", "prio": -5, "policy": "drop", "handle": 8}
    text = ruleset([match(DPORT, PORT), DROP], more=({"chain": early},))
    ruled = parse_ruleset(text)
    assert ruled is not None
    newcomer = Newcomer(port=PORT, address=HERE)
    found = {wall.opens(PORT) for wall in closed_by(ruled, newcomer, iptables=False, firewalld=False)}
    assert found == {DELETE.removeprefix("sudo "), f"nft insert rule inet mine early tcp dport {PORT} accept"}


def test_tables_of_iptables_and_of_firewalld_are_left_to_them() -> None:
    ours = json.loads(ruleset(policy="drop"))
    [chain] = [row["chain"] for row in ours["nftables"] if "chain" in row]
    chain |= {"family": "ip", "table": "filter", "name": "INPUT"}
    text = json.dumps(ours)
    walls = Firewalls(nft=said(text), iptables="-P INPUT ACCEPT\n")
    assert sick(replace(LINUX, port=PORT, firewalls=walls)) == []
    alone = replace(LINUX, port=PORT, firewalls=replace(walls, iptables=""))
    assert only(alone, "network.firewall").command == (f"sudo nft insert rule ip filter INPUT tcp dport {PORT} accept")
    chain |= {"family": "inet", "table": "firewalld"}
    walls = Firewalls(nft=said(json.dumps(ours)), firewalld=said(f"{PORT}/tcp"))
    assert sick(replace(LINUX, port=PORT, firewalls=walls)) == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            said("Operation not permitted (you must be root)\nnetlink: Error: cache init failed", 1),
            "only root",
        ),
        (said("", None), "not known"),
        (said('{"nftables": 7'), "not known"),
        (said("{" * 100_000), "not known"),
    ],
)
def test_rules_that_are_not_to_be_seen(answer: ProgramAnswer, says: str) -> None:
    from cuadrilla.doctor.network import firewall

    seen = replace(LINUX, port=PORT, firewalls=Firewalls(nft=answer))
    [found] = list(firewall(seen))
    assert (found.level, says in found.cause) == ("ok", True)
    assert sick(seen) == []


def test_rules_that_lead_round_and_round_end() -> None:
    there = [{"chain": {**TABLE, "name": name, "handle": 9}} for name in ("a", "b")]
    jumps = [
        rule_in(name, [{"jump": {"target": other}}], number)
        for name, other in (("a", "b"), ("b", "a"))
        for number in range(1, 20)
    ]
    ruled = parse_ruleset(ruleset([{"jump": {"target": "a"}}], policy="drop", more=(*there, *jumps)))
    assert ruled is not None
    assert list(closed_by(ruled, Newcomer(port=PORT, address=HERE), iptables=False, firewalld=False)) == []
    assert MOST_STEPS < 10**6


@pytest.mark.parametrize(
    "text", ["", "[]", '{"nftables": {}}', '{"nftables": [3, {"rule": 5}, {"chain": {"hook": "input"}}]}']
)
def test_what_is_no_ruleset_of_ours(text: str) -> None:
    found = parse_ruleset(text)
    assert found is None or not list(closed_by(found, Newcomer(port=1, address=""), iptables=True, firewalld=True))
