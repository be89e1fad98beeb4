"""All checks by name, side by side: each reads something of `Here` and judges it, or has nothing to say.

A new one is a function in the file of its family and a line here.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from cuadrilla.doctor import docker, mac, machine, network, nvidia, wsl
from cuadrilla.doctor.diagnosis import Diagnosis, warn
from cuadrilla.doctor.here import DEVICES_SECONDS, Here
from cuadrilla.messages import Message

PATIENCE_SECONDS = 10.0
"""Beyond what programs may take, for a file system that no time limit reaches."""
Check = Callable[[Here], Iterable[Diagnosis]]
CHECKS: Mapping[str, Check] = {
    "machine.system": machine.system,
    "machine.python": machine.python,
    "machine.memory": machine.memory,
    "machine.disk": machine.disk,
    "machine.files": machine.files,
    "machine.slow_folder": machine.slow_folder,
    "machine.shm": machine.shared_memory,
    "machine.power": machine.power,
    "machine.clock": machine.clock,
    "machine.variables": machine.variables,
    "mac.python": mac.python,
    "mac.system": mac.system,
    "nvidia.torch": nvidia.torch,
    "nvidia.cards": nvidia.cards,
    "nvidia.hidden": nvidia.hidden,
    "nvidia.driver": nvidia.driver,
    "nvidia.wsl_driver": nvidia.wsl_driver,
    "wsl.version": wsl.version,
    "wsl.memory": wsl.memory,
    "wsl.network": wsl.network,
    "wsl.stale": wsl.stale,
    "docker.service": docker.service,
    "docker.cards": docker.cards,
    "docker.mac_host": docker.mac_host,
    "network.address": network.address,
    "network.vpn": network.vpn,
    "network.mtu": network.mtu,
    "network.port": network.port,
    "network.ufw": network.ufw,
    "network.firewalld": network.firewalld,
    "network.windows_firewall": network.windows_firewall,
    "network.mac_firewall": network.mac_firewall,
}
"""In the order in which they are shown."""


def examine(here: Here, *, seconds: float = PATIENCE_SECONDS + DEVICES_SECONDS) -> Iterator[tuple[str, Diagnosis]]:
    """(name of the check, what it found). A check that a dead file system holds is left behind, and does not keep the
    process from ending."""
    found: dict[str, list[Diagnosis]] = {}

    def look(name: str, check: Check) -> None:
        found[name] = list(check(here))

    threads = {name: threading.Thread(target=look, args=(name, check), daemon=True) for name, check in CHECKS.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(deadline - time.monotonic(), 0.0))
        yield from ((name, each) for each in found.get(name, ()))
    if silent := [name for name in CHECKS if name not in found]:
        yield "machine.unanswered", warn(
            Message("no answer about: {names}; a folder of another machine, or of Windows, may hang",
                    names=", ".join(silent)),
            command="wsl --shutdown" if here.host.wsl else "df",
            shell="powershell" if here.host.wsl else "here",
        )  # fmt: skip
