"""The checks, by name: each looks at `Symptoms` and says what it finds, nothing where it has nothing to say."""

from collections.abc import Callable, Iterator, Mapping

from cuadrilla.doctor import docker, mac, machine, network, nvidia, wsl
from cuadrilla.doctor.diagnosis import Diagnosis
from cuadrilla.doctor.facts import Symptoms

Check = Callable[[Symptoms], Iterator[Diagnosis]]

CHECKS: Mapping[str, Check] = {
    "machine.system": machine.system,
    "machine.python": machine.python,
    "machine.memory": machine.memory,
    "machine.disk": machine.disk,
    "machine.files": machine.files,
    "machine.slow_disk": machine.slow_disk,
    "machine.unanswered": machine.unanswered,
    "machine.power": machine.power,
    "machine.clock": machine.clock,
    "machine.name": machine.name,
    "machine.variables": machine.variables,
    "mac.python": mac.python,
    "mac.system": mac.system,
    "nvidia.torch": nvidia.torch,
    "nvidia.cards": nvidia.cards,
    "nvidia.hidden": nvidia.hidden,
    "nvidia.driver": nvidia.driver,
    "nvidia.wsl_driver": nvidia.wsl_driver,
    "wsl.version": wsl.version,
    "wsl.files": wsl.files,
    "wsl.memory": wsl.memory,
    "wsl.network": wsl.network,
    "wsl.stale": wsl.stale,
    "docker.service": docker.service,
    "docker.engine": docker.engine,
    "docker.past_ufw": docker.past_ufw,
    "docker.cards": docker.cards,
    "docker.published": docker.published,
    "docker.mac_host": docker.mac_host,
    "docker.shared_memory": docker.shared_memory,
    "network.address": network.address,
    "network.vpn": network.vpn,
    "network.mtu": network.mtu,
    "network.own_name": network.own_name,
    "network.port": network.port,
    "network.firewall": network.firewall,
}
"""In the order in which they are shown. A name stays: programs read it."""


def examine(seen: Symptoms) -> Iterator[tuple[str, Diagnosis]]:
    """(name of the check, what it found)."""
    for name, check in CHECKS.items():
        for found in check(seen):
            yield name, found
