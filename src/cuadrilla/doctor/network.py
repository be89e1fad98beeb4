"""Checks of the network: the address that others dial, and what keeps them from the port of a coordinator.

Firewalls are checked only if a port is given (`--port`) or a coordinator runs here: a machine that joins a crew dials
out and need not be reached. `cuadrilla doctor HOST:PORT` on another machine tries the whole way.
"""

import ipaddress
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from cuadrilla.doctor.finding import Finding, fail, ok, warn
from cuadrilla.doctor.here import Here
from cuadrilla.errors import LinkError
from cuadrilla.host.card import tunnel_out
from cuadrilla.host.container import read_text
from cuadrilla.link.address import choices, local_address
from cuadrilla.messages import Message


def address(here: Here) -> Iterator[Finding]:
    """There is a network, and `cuadrilla up` can choose this machine's address on it by itself."""
    try:
        own = local_address(here.way_out, here.cards)
    except LinkError as error:
        found = choices(here.cards)
        if here.port_state == "ours":
            yield ok(Message("the coordinator of this machine listens on an address that its owner has named"))
        elif here.facts.container and not found:
            yield ok(Message("this container has no network"))
        else:
            yield warn(error.message, remedy=error.hint, command=_up(found[0]) if found else "")
        return
    card = next((card.name for card in here.cards if own in card.addresses), "")
    tunnel = tunnel_out(here.way_out, here.cards)
    if ipaddress.ip_address(own).is_link_local:
        cause = Message("{address} is an address that the machine gave itself: no router answers", address=own)
        yield warn(cause, command=here.as_root("dhclient -v") if here.facts.system == "Linux" else "ipconfig /renew")
    elif tunnel and here.port_state != "ours":
        yield warn(
            Message(
                "the way out of this machine is {card}, a VPN or a modem; others on the local network reach it at "
                "{addresses}",
                card=tunnel.name,
                addresses=own,
            ),
            command=_up(own),
            remedy=Message(
                "if they do not get through, allow the local network in the VPN's settings; if they are in the VPN "
                "too: {command}",
                command=_up(here.way_out),
            ),
        )
    else:
        yield ok(Message("{address} ({card})", address=own, card=card))


def _up(address: str) -> str:
    return f"cuadrilla up --listen {shlex.quote(address)}"


def port(here: Here) -> Iterator[Finding]:
    """No other program listens on the port."""
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
            if here.facts.system == "Linux"
            else f"netstat -an | grep {here.port}",
        )


def ufw(here: Here) -> Iterator[Finding]:
    """Ubuntu's firewall lets the port in. Only root can read its rules."""
    if here.port is None or here.facts.system != "Linux":
        return
    said, command = here.run("ufw", "status"), here.as_root(f"ufw allow {here.port}/tcp")
    if re.search(rf"^({here.port}(/tcp)?|Anywhere)\s+ALLOW", said.text, re.MULTILINE):
        yield ok(Message("the firewall ufw lets port {port} in", port=here.port))
    elif "Status: active" in said.text:
        yield fail(Message("the firewall ufw does not let port {port} in", port=here.port), command=command)
    elif not said.ok and "ENABLED=yes" in read_text(Path("/etc/ufw/ufw.conf")).splitlines():
        cause = Message("the firewall ufw is on; only root can see whether it lets port {port} in", port=here.port)
        yield warn(cause, command=command)


def firewalld(here: Here) -> Iterator[Finding]:
    """Fedora's firewall lets the port in."""
    if here.port is None or here.facts.system != "Linux":
        return
    said = here.run("firewall-cmd", f"--query-port={here.port}/tcp").text
    if said == "yes":
        yield ok(Message("the firewall firewalld lets port {port} in", port=here.port))
    elif said == "no":  # else: not installed, not running, or not for this user to see
        yield fail(
            Message("the firewall firewalld does not let port {port} in", port=here.port),
            remedy=Message("to keep it after a restart: firewall-cmd --runtime-to-permanent"),
            command=here.as_root(f"firewall-cmd --add-port={here.port}/tcp"),
        )


def windows_firewall(here: Here) -> Iterator[Finding]:
    """Windows' firewall has the rule that `setup.ps1`, or the command shown here, makes."""
    if here.port is None or here.facts.system != "Windows":
        return
    said = here.run("netsh", "advfirewall", "firewall", "show", "rule", "name=cuadrilla")
    if said.ok and re.search(rf"\b{here.port}\b", said.text):
        yield ok(Message("Windows' firewall lets port {port} in", port=here.port))
        return
    yield warn(
        Message("Windows' firewall has no rule for port {port}", port=here.port),
        command=f"New-NetFirewallRule -DisplayName cuadrilla -Direction Inbound -Action Allow -Protocol TCP "
        f"-LocalPort {here.port} -Profile Private",
        shell="administrator",
    )
