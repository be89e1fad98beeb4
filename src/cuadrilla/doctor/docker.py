"""Checks of Docker: its service answers, containers can use the card, and a container on a Mac has no GPU.

Docker is needed for compose.yaml only, so nothing here is more than a warning.
"""

from collections.abc import Iterator

from cuadrilla.doctor.finding import Finding, ok, warn
from cuadrilla.doctor.here import Here
from cuadrilla.host.programs import NOT_FOUND, json_rows
from cuadrilla.messages import Message


def service(here: Here) -> Iterator[Finding]:
    """`docker info` answers, and containers can use the card that this machine has."""
    answer = here.run("docker", "info", "--format", "{{json .}}")
    if answer.code == NOT_FOUND or (here.facts.container and not answer.ok):
        return
    info = next(iter(json_rows(answer.text)), {})  # Docker may print warnings beside it
    if answer.ok and info.get("ServerVersion"):
        system = str(info.get("OperatingSystem", ""))
        yield ok(Message("Docker {version} ({system})", version=str(info["ServerVersion"]), system=system))
        lends = "nvidia" in f"{info.get('Runtimes')}{info.get('DiscoveredDevices')}" or "Docker Desktop" in system
        if not lends and any(device.kind == "cuda" for device in here.devices):
            yield warn(
                Message('containers cannot use the card: could not select device driver "nvidia"'),
                remedy=Message("then restart Docker; the toolkit: docs.nvidia.com/datacenter/cloud-native"),
                command=here.as_root("nvidia-ctk runtime configure --runtime=docker"),
            )
    elif "permission denied" in answer.text.lower():
        yield warn(
            Message("this user may not use Docker"),
            remedy=Message("then log in again; a user of Docker can become root of this machine"),
            command=here.as_root("usermod -aG docker $USER"),
        )
    else:
        start = "open -a Docker" if here.facts.system == "Darwin" else here.as_root("systemctl restart docker")
        yield warn(Message("Docker is installed, and its service does not answer"), command=start)


def mac(here: Here) -> Iterator[Finding]:
    """This is no container on a Mac, where containers have no GPU."""
    if here.facts.container and "linuxkit" in (here.facts.kernel or "") and here.facts.machine in ("aarch64", "arm64"):
        yield warn(
            Message("a container on a Mac has no GPU: the machine trains on its processor"),
            remedy=Message("run cuadrilla on the Mac itself, in a terminal"),
            command="make setup",
            shell="host",
        )
