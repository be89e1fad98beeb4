"""Checks of the network: cards, the machine's own name, and what keeps others from the port of a coordinator.

The firewalls are looked at only when a port is given (`--port`) or a coordinator runs here: a machine that joins a
crew dials out and need not be reached. As far as a user may see them: the rules of iptables and nftables are root's.
"""

import ipaddress
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from cuadrilla.doctor import nftables
from cuadrilla.doctor.diagnosis import Diagnosis, as_root, fail, warn, well
from cuadrilla.doctor.facts import Symptoms
from cuadrilla.doctor.programs import ProgramAnswer
from cuadrilla.host.card import near, tunnel_out
from cuadrilla.messages import Message

SMALL_MTU = 1280  # the least that IPv6 allows; VPNs stay above it
USUAL_MTU = 1500
CLOSED = ("DROP", "REJECT")
# Of a rule of iptables: options without which it is for this port or for all of them.
HARMLESS = {"-p", "--protocol", "-m", "--match", "--dport", "--dports", "-j", "--reject-with", "--comment", "-i", "-A"}


@dataclass(frozen=True)
class Ruling:
    """What INPUT does with a new connection to a port. `rule`: the one that decides; "" is the chain's policy."""

    target: str
    rule: str = ""
    names_port: bool = False


def address(seen: Symptoms) -> Iterator[Diagnosis]:
    """There is a network at all, and one address of this machine on it."""
    card = next((card for card in seen.cards if seen.address and seen.address in card.addresses), None)
    if not seen.address and seen.port_state == "ours":
        yield well(Message("the coordinator of this machine listens on an address that its owner has named"))
    elif not seen.address and any(near(seen.cards, version=version) for version in (4, 6)):
        yield from _undecided(seen)
    elif not seen.address and any(card.is_tunnel and card.addresses for card in seen.cards):
        return  # `vpn` says so
    elif not seen.address and seen.host.container:
        yield well(Message("this container has no network"))
    elif not seen.address:
        yield warn(
            Message("no network that other machines could be on"),
            remedy=Message("connect the cable or the Wi-Fi; one machine alone trains without"),
        )
    elif ipaddress.ip_address(seen.address).is_link_local:
        yield warn(
            Message("{address} is an address that the machine gave itself: no router answers", address=seen.address),
            command=as_root("dhclient -v", is_root=seen.is_root) if seen.host.system == "Linux" else "ipconfig /renew",
        )
    elif card is not None:
        yield well(Message("{address} ({card})", address=seen.address, card=card.name))


def _undecided(seen: Symptoms) -> Iterator[Diagnosis]:
    """Addresses that `cuadrilla up` does not choose among by itself."""
    if several := near(seen.cards):
        if tunnel_out(seen.way_out, seen.cards) is None:  # else `vpn` says so
            said = "this machine is on several networks, and none has a default route: {addresses}"
            yield warn(Message(said, addresses=", ".join(several)), command=_up(several[0]))
    else:
        (best, *_) = near(seen.cards, version=6)
        yield warn(
            Message("this machine has only IPv6 addresses: others that have none cannot reach it, nor it them"),
            command=_up(f"[{best}]"),
            remedy=Message("a router that gives out IPv4 addresses (DHCP) makes it unnecessary to name one"),
        )


def _up(address: str) -> str:
    return f"cuadrilla up --listen {shlex.quote(address)}"


def vpn(seen: Symptoms) -> Iterator[Diagnosis]:
    """The way out of this machine is the network that the machines beside it are on."""
    tunnel, several = tunnel_out(seen.way_out, seen.cards), near(seen.cards)
    if tunnel is None:
        return
    if seen.port_state == "ours":
        yield well(Message("the way out of this machine is {card}, a VPN or a modem", card=tunnel.name))
        return
    if not (seen.address or several):
        if not near(seen.cards, version=6):  # else `address` says so
            alone = "the only network of this machine is {card}, a VPN or a modem: only machines in it reach this one"
            yield warn(Message(alone, card=tunnel.name), command=_up(seen.way_out))
        return
    cause = Message(
        "the way out of this machine is {card}, a VPN or a modem; others on the local network reach it at {addresses}"
        if seen.address
        else "the way out of this machine is {card}, a VPN or a modem, and it is on several networks besides: "
        "{addresses}",
        card=tunnel.name,
        addresses=seen.address or ", ".join(several),
    )
    closed = Message(
        "if they do not get through, allow the local network in the VPN's settings; if they are in the VPN too: "
        "{command}",
        command=_up(seen.way_out),
    )
    yield warn(cause, command=_up(seen.address or several[0]), remedy=closed)


def mtu(seen: Symptoms) -> Iterator[Diagnosis]:
    """Packets of a card that leads to others are not tiny."""
    for card in seen.cards:
        if card.mtu < SMALL_MTU and (card.is_default or seen.address in card.addresses) and seen.address:
            yield warn(
                Message("the card {card} sends packets of {mtu} bytes: slow", card=card.name, mtu=card.mtu),
                command=as_root(f"ip link set dev {shlex.quote(card.name)} mtu {USUAL_MTU}", is_root=seen.is_root)
                if seen.host.system == "Linux"
                else f"sudo ifconfig {shlex.quote(card.name)} mtu {USUAL_MTU}",
                fixable=seen.host.system == "Linux",
            )


def own_name(seen: Symptoms) -> Iterator[Diagnosis]:
    """The name leads somewhere; to loopback is usual, and matters to torch's own groups only."""
    leads_to = seen.hostname_leads_to
    if leads_to is None:
        if not seen.host.container:
            yield warn(
                Message("this machine's own name, {name}, leads nowhere: programs wait for it", name=seen.hostname),
                command=_hosts(seen),
            )
    elif "127.0.1.1" in leads_to:
        yield well(
            Message(
                "{name} is 127.0.1.1 here, as on every Debian; `cuadrilla launch` tells torch the card",
                name=seen.hostname,
            )
        )


def _hosts(seen: Symptoms) -> str:
    """A line more in a file that is root's."""
    line = shlex.quote(f"127.0.1.1 {seen.hostname}")
    return f"echo {line} | {as_root('tee -a /etc/hosts', is_root=seen.is_root)}"


def port(seen: Symptoms) -> Iterator[Diagnosis]:
    """Nobody else has it."""
    if seen.port is None:
        return
    if seen.port_state == "ours":
        yield well(Message("the coordinator of this machine listens on port {port}", port=seen.port))
    elif seen.port_state == "free":
        yield well(Message("port {port} is free; `cuadrilla up` will listen there", port=seen.port))
    else:
        yield _taken(seen)


def _taken(seen: Symptoms) -> Diagnosis:
    return fail(
        Message("port {port} is taken by another program", port=seen.port),
        remedy=Message("end it, or coordinate on another port: cuadrilla up RUN --listen ADDRESS:PORT"),
        command=as_root(f"ss -ltnp sport = :{seen.port}", is_root=seen.is_root)
        if seen.host.system == "Linux"
        else f"netstat -an | grep {seen.port}",
    )


def firewall(seen: Symptoms) -> Iterator[Diagnosis]:
    """Each firewall that this system may have."""
    if seen.port is None:
        return
    found = [*_ufw(seen, seen.port), *_firewalld(seen, seen.port)] or [*_iptables(seen, seen.port)]
    closed = list(_nftables(seen, seen.port, judged=bool(found)))
    if any(each.level != "ok" for each in closed):  # then it does not matter that the others let everybody in
        found = [each for each in found if each.level != "ok"]
    found += closed
    found += [*_defender(seen, seen.port), *_mac(seen, seen.port)]
    yield from found


def _ufw(seen: Symptoms, port: int) -> Iterator[Diagnosis]:
    walls = seen.firewalls
    told = walls.ufw.text if walls.ufw and walls.ufw.ok else ""
    active = "Status: active" in told if told else walls.ufw_enabled
    if not active:
        return
    command = as_root(f"ufw allow {port}/tcp", is_root=seen.is_root)
    if not told:
        cause = Message("the firewall ufw is on; only root can see whether it lets port {port} in", port=port)
        yield warn(cause, command=command)
    elif ufw_allows(told, port):
        yield well(Message("the firewall ufw lets port {port} in", port=port))
    else:
        yield fail(Message("the firewall ufw does not let port {port} in", port=port), command=command, fixable=True)


def ufw_allows(status: str, port: int) -> bool:
    """From `ufw status`: the first row for the port or for all of them decides."""
    for line in status.splitlines():
        found = re.match(r"(Anywhere|[\d:,]+)(?:/(tcp|udp))?\s+(ALLOW|DENY|REJECT|LIMIT)\b", line.strip())
        if not found or found[2] == "udp":
            continue
        if found[1] == "Anywhere" or _in_ports(found[1].replace(":", "-"), port):
            return found[3] in ("ALLOW", "LIMIT")
    return False


def _in_ports(text: str, port: int) -> bool:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and int(first) <= port <= (int(last) if last.isdigit() else int(first)):
            return True
    return False


def _firewalld(seen: Symptoms, port: int) -> Iterator[Diagnosis]:
    answer = seen.firewalls.firewalld
    if answer is None or not answer.ok:
        return  # not installed, not running, or not for this user to see
    open_ports = (part.removesuffix("/tcp") for part in answer.text.split() if part.endswith("/tcp"))
    if any(_in_ports(part, port) for part in open_ports):
        yield well(Message("the firewall firewalld lets port {port} in", port=port))
        return
    yield fail(
        Message("the firewall firewalld does not let port {port} in", port=port),
        remedy=Message("to keep it after a restart: firewall-cmd --runtime-to-permanent"),
        command=as_root(f"firewall-cmd --add-port={port}/tcp", is_root=seen.is_root),
        fixable=True,
    )


def _iptables(seen: Symptoms, port: int) -> Iterator[Diagnosis]:
    verdict = judge(seen.firewalls.iptables, port)
    if verdict is None:
        return
    if verdict.target not in CLOSED:
        yield well(Message("iptables lets port {port} in", port=port))
        return
    if verdict.rule:
        cause = Message("iptables keeps others from port {port}: {rule}", port=port, rule=verdict.rule)
    else:
        cause = Message("iptables keeps others from port {port}: its policy is DROP", port=port)
    command = f"iptables -I INPUT -p tcp --dport {port} -j ACCEPT"
    if verdict.names_port:
        command = "iptables " + re.sub(r"^-A", "-D", verdict.rule)
    yield fail(cause, command=as_root(command, is_root=seen.is_root), fixable=True)


def judge(rules: str, port: int) -> Ruling | None:
    """What `iptables -S` says of a new TCP connection from anybody to the port; None if there are no rules to see.

    Rules with a condition that is not understood (a sender, a state, another chain) are passed over.
    """
    policy = re.search(r"^-P INPUT (\w+)$", rules, re.MULTILINE)
    if policy is None:
        return None
    for rule in re.findall(r"^-A INPUT .*$", rules, re.MULTILINE):
        words = shlex.split(rule)
        options = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("-")}
        if "!" in words or options.keys() - HARMLESS or options.get("-i") == "lo":
            continue
        if options.get("-p", "tcp") not in ("tcp", "all") or options.get("-j") not in (*CLOSED, "ACCEPT"):
            continue
        ports = options.get("--dport") or options.get("--dports")
        if ports is None or _in_ports(ports.replace(":", "-"), port):
            return Ruling(options["-j"], rule, names_port=ports == str(port))
    return Ruling(policy[1])


def _nftables(seen: Symptoms, port: int, *, judged: bool) -> Iterator[Diagnosis]:
    """`judged`: another firewall has had its say, so that it is no news that this one lets everybody in."""
    answer, walls = seen.firewalls.nft, seen.firewalls
    ruleset = nftables.parse_ruleset(answer.text) if answer is not None and answer.ok else None
    if answer is None or ruleset is None:
        yield from _unseen(seen, answer, port)
        return
    card = next((card.name for card in seen.cards if seen.address and seen.address in card.addresses), "")
    newcomer = nftables.Newcomer(port=port, address=seen.address, card=card)
    firewalld = walls.firewalld is not None and walls.firewalld.ok
    closed = list(nftables.closed_by(ruleset, newcomer, iptables=bool(walls.iptables), firewalld=firewalld))
    for wall in closed:
        yield _closed(seen, wall, port)
    if ruleset.bases and not closed and not judged:
        yield well(Message("nftables lets port {port} in", port=port))


def _closed(seen: Symptoms, wall: nftables.Closed, port: int) -> Diagnosis:
    chain = " ".join(wall.chain)
    kept = "nftables keeps others from port {port}: rule {handle} of {chain}"
    cause = Message(kept, port=port, handle=wall.handle, chain=chain)
    if not wall.handle:
        cause = Message("nftables keeps others from port {port}: the policy of {chain} is drop", port=port, chain=chain)
    return fail(
        cause,
        remedy=Message("to keep it after a restart, change the file with these rules, such as /etc/nftables.conf"),
        command=as_root(wall.opens(port), is_root=seen.is_root),
        fixable=True,
    )


def _unseen(seen: Symptoms, answer: ProgramAnswer | None, port: int) -> Iterator[Diagnosis]:
    if answer is None:
        return
    if not answer.ok and answer.code is not None and not seen.is_root:
        command = f"sudo cuadrilla doctor --port {port}"
        yield well(Message("only root can see what nftables lets in: {command}", command=command))
        return
    yield well(Message("what nftables lets in is not known: its rules cannot be read here"))


def _defender(seen: Symptoms, port: int) -> Iterator[Diagnosis]:
    answer = seen.firewalls.defender_rule
    if answer is None:
        return
    if answer.ok and re.search(rf"\b{port}\b", answer.text):
        yield well(Message("Windows' firewall lets port {port} in", port=port))
        return
    yield warn(
        Message("Windows' firewall has no rule for port {port}", port=port),
        command=f"New-NetFirewallRule -DisplayName cuadrilla -Direction Inbound -Action Allow -Protocol TCP "
        f"-LocalPort {port} -Profile Private",
        shell="administrator",
    )


def _mac(seen: Symptoms, port: int) -> Iterator[Diagnosis]:
    state, program = seen.firewalls.mac, seen.firewalls.mac_program
    if state is None or not state.ok or "disabled" in state.text.lower() or "State = 0" in state.text:
        return
    if program is not None and "permitted" in program.text.lower():
        yield well(Message("the Mac's firewall lets this Python in"))
        return
    yield warn(
        Message("the Mac's firewall may keep others from port {port}", port=port),
        command=f"sudo /usr/libexec/ApplicationFirewall/socketfilterfw --unblockapp "
        f"{shlex.quote(seen.installation.python)}",
    )
