"""Checks of the network: cards, and what keeps others from the port of a coordinator.

The firewalls are looked at only when a port is given (`--port`) or a coordinator runs here: a machine that joins a
crew dials out and need not be reached. Rules of iptables and nftables are not read: `cuadrilla doctor HOST:PORT` on
another machine tries the way.
"""

import ipaddress
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from cuadrilla.doctor.diagnosis import Diagnosis, fail, ok, warn
from cuadrilla.doctor.here import Here
from cuadrilla.doctor.wsl import lets_in
from cuadrilla.errors import LinkError
from cuadrilla.host.card import tunnel_out
from cuadrilla.host.container import read_text
from cuadrilla.link.address import choices, local_address
from cuadrilla.messages import Message

SMALL_MTU = 1280  # the least that IPv6 allows; VPNs stay above it
USUAL_MTU = 1500
FIREWALL_OF_MAC = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def address(here: Here) -> Iterator[Diagnosis]:
    """There is a network at all, and one address of this machine on it that `cuadrilla up` takes by itself."""
    try:
        own = local_address(here.way_out, here.cards)
    except LinkError as error:
        if here.port_state == "ours":
            yield ok(Message("the coordinator of this machine listens on an address that its owner has named"))
        elif here.host.container and not _choice(here):
            yield ok(Message("this container has no network"))
        else:
            yield warn(error.message, remedy=error.hint, command=_choice(here))
        return
    if ipaddress.ip_address(own).is_link_local:
        yield warn(
            Message("{address} is an address that the machine gave itself: no router answers", address=own),
            command=here.as_root("dhclient -v") if here.host.system == "Linux" else "ipconfig /renew",
        )
        return
    card = next((card.name for card in here.cards if own in card.addresses), "")
    yield ok(Message("{address} ({card})", address=own, card=card))


def _choice(here: Here) -> str:
    """The command that names an address where `cuadrilla up` does not choose by itself."""
    found = choices(here.cards)
    return _up(found[0]) if found else ""


def vpn(here: Here) -> Iterator[Diagnosis]:
    """The way out of this machine is the network that the machines beside it are on."""
    tunnel = tunnel_out(here.way_out, here.cards)
    if tunnel is None or here.port_state == "ours" or not here.address:
        return  # `address` says so where it cannot choose
    yield warn(
        Message(
            "the way out of this machine is {card}, a VPN or a modem; others on the local network reach it at "
            "{addresses}",
            card=tunnel.name,
            addresses=here.address,
        ),
        command=_up(here.address),
        remedy=Message(
            "if they do not get through, allow the local network in the VPN's settings; if they are in the VPN too: "
            "{command}",
            command=_up(here.way_out),
        ),
    )


def _up(address: str) -> str:
    return f"cuadrilla up --listen {shlex.quote(address)}"


def mtu(here: Here) -> Iterator[Diagnosis]:
    """Packets of a card that leads to others are not tiny."""
    for card in here.cards:
        if card.mtu < SMALL_MTU and here.address and (card.is_default or here.address in card.addresses):
            name = shlex.quote(card.name)
            yield warn(
                Message("the card {card} sends packets of {mtu} bytes: slow", card=card.name, mtu=card.mtu),
                command=here.as_root(f"ip link set dev {name} mtu {USUAL_MTU}")
                if here.host.system == "Linux"
                else f"sudo ifconfig {name} mtu {USUAL_MTU}",
            )


def port(here: Here) -> Iterator[Diagnosis]:
    """Nobody else has it."""
    if here.port is None:
        return
    if here.port_state == "ours":
        yield ok(Message("the coordinator of this machine listens on port {port}", port=here.port))
    elif here.port_state == "free":
        yield ok(Message("port {port} is free; `cuadrilla up` will listen there", port=here.port))
    else:
        yield fail(
            Message("port {port} is taken by another program", port=here.port),
            remedy=Message("end it, or coordinate on another port: cuadrilla up RUN --listen ADDRESS:PORT"),
            command=here.as_root(f"ss -ltnp sport = :{here.port}")
            if here.host.system == "Linux"
            else f"netstat -an | grep {here.port}",
        )


def ufw(here: Here, *, settings: Path = Path("/etc/ufw/ufw.conf")) -> Iterator[Diagnosis]:
    """The rules of Ubuntu's firewall, which are root's."""
    if here.port is None or here.host.system != "Linux":
        return
    said = here.run("ufw", "status")
    if said is None or not said.ok:
        if "ENABLED=yes" in read_text(settings).splitlines():
            cause = Message("the firewall ufw is on; only root can see whether it lets port {port} in", port=here.port)
            yield warn(cause, command=here.as_root(f"ufw allow {here.port}/tcp"))
    elif "Status: active" in said.text:
        if ufw_allows(said.text, here.port):
            yield ok(Message("the firewall ufw lets port {port} in", port=here.port))
        else:
            cause = Message("the firewall ufw does not let port {port} in", port=here.port)
            yield fail(cause, command=here.as_root(f"ufw allow {here.port}/tcp"))


def ufw_allows(status: str, port: int) -> bool:
    """From `ufw status`: the first row for the port or for all of them decides."""
    for line in status.splitlines():
        found = re.match(r"(Anywhere|[\d:,]+)(?:/(tcp|udp))?\s+(ALLOW|DENY|REJECT|LIMIT)\b", line.strip())
        if found and found[2] != "udp" and (found[1] == "Anywhere" or lets_in(found[1], port)):
            return found[3] in ("ALLOW", "LIMIT")
    return False


def firewalld(here: Here) -> Iterator[Diagnosis]:
    """The open ports of Fedora's firewall."""
    said = here.run("firewall-cmd", "--list-ports") if here.port is not None and here.host.system == "Linux" else None
    if said is None or not said.ok or here.port is None:
        return  # not installed, not running, or not for this user to see
    if lets_in(" ".join(part.removesuffix("/tcp") for part in said.text.split() if part.endswith("/tcp")), here.port):
        yield ok(Message("the firewall firewalld lets port {port} in", port=here.port))
        return
    yield fail(
        Message("the firewall firewalld does not let port {port} in", port=here.port),
        remedy=Message("to keep it after a restart: firewall-cmd --runtime-to-permanent"),
        command=here.as_root(f"firewall-cmd --add-port={here.port}/tcp"),
    )


def windows_firewall(here: Here) -> Iterator[Diagnosis]:
    """The rule that `setup.ps1` and this command make."""
    if here.port is None or here.host.system != "Windows":
        return
    said = here.run("netsh", "advfirewall", "firewall", "show", "rule", "name=cuadrilla")
    if said and said.ok and re.search(rf"\b{here.port}\b", said.text):
        yield ok(Message("Windows' firewall lets port {port} in", port=here.port))
        return
    yield warn(
        Message("Windows' firewall has no rule for port {port}", port=here.port),
        command=f"New-NetFirewallRule -DisplayName cuadrilla -Direction Inbound -Action Allow -Protocol TCP "
        f"-LocalPort {here.port} -Profile Private",
        shell="administrator",
    )


def mac_firewall(here: Here) -> Iterator[Diagnosis]:
    """The firewall of a Mac lets programs in, not ports."""
    state = here.run(FIREWALL_OF_MAC, "--getglobalstate") if here.port is not None else None
    if state is None or not state.ok or "State = 0" in state.text:
        return
    program = here.run(FIREWALL_OF_MAC, "--getappblocked", sys.executable)
    if program is not None and "permitted" in program.text.lower():
        yield ok(Message("the Mac's firewall lets this Python in"))
        return
    yield warn(
        Message("the Mac's firewall may keep others from port {port}", port=here.port),
        command=f"sudo {FIREWALL_OF_MAC} --unblockapp {shlex.quote(sys.executable)}",
    )
