"""All checks by name. A new one is a function in the file of its family and a line here."""

from collections.abc import Callable, Iterator, Mapping

from cuadrilla.doctor import devices, docker, machine, network, wsl
from cuadrilla.doctor.finding import Finding
from cuadrilla.doctor.here import Here

CHECKS: Mapping[str, Callable[[Here], Iterator[Finding]]] = {
    "machine.system": machine.system,
    "machine.memory": machine.memory,
    "machine.disk": machine.disk,
    "devices.torch": devices.torch,
    "devices.gpu": devices.gpu,
    "wsl.version": wsl.version,
    "wsl.driver": wsl.driver,
    "wsl.memory": wsl.memory,
    "wsl.folder": wsl.folder,
    "wsl.network": wsl.network,
    "docker.service": docker.service,
    "docker.mac": docker.mac,
    "network.address": network.address,
    "network.port": network.port,
    "network.ufw": network.ufw,
    "network.firewalld": network.firewalld,
    "network.windows_firewall": network.windows_firewall,
}
"""In the order in which they are shown."""


def examine(here: Here) -> Iterator[tuple[str, Finding]]:
    """(name of the check, what it found), as it is found."""
    for name, check in CHECKS.items():
        for found in check(here):
            yield name, found
