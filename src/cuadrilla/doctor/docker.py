"""Checks of Docker: its service answers, lends the card, and what a container lacks that runs here.

Docker is needed for `cuadrilla compose` only, so that nothing here is more than a warning where it is absent.
"""

import ipaddress
import json
import re
from collections.abc import Iterator
from typing import Any

from cuadrilla.doctor.diagnosis import Diagnosis, as_root, warn, well
from cuadrilla.doctor.facts import PROGRAM_SECONDS, Symptoms
from cuadrilla.host.reachability import HOST
from cuadrilla.messages import Message

MIB = 2**20
FIRST_CLOSED = 28
"""The first Engine under which only published ports of containers are reached from the network, where they are
published (moby 45610, 49325). That of Docker Desktop, and one without root, never let others in.
"""
MOST_NAMED = 4
SMALLEST_SHM_BYTES = 64 * MIB
"""What Docker gives a container; data is read without it, PyTorch's DataLoader workers and Ray need some."""


def service(seen: Symptoms) -> Iterator[Diagnosis]:
    """`docker info` answers."""
    answer = seen.docker.info
    if answer is None or (seen.host.container and not answer.ok and not seen.docker.context):
        return
    info = parse_info(answer.text)
    if answer.ok and info.get("ServerVersion"):
        system = str(info.get("OperatingSystem", ""))
        yield well(Message("Docker {version} ({system})", version=str(info["ServerVersion"]), system=system))
    elif answer.code is None:
        yield warn(
            Message("Docker does not answer within {seconds:g} s", seconds=PROGRAM_SECONDS),
            command=_start(seen, "restart"),
        )
    elif "permission denied" in answer.text.lower():
        yield warn(
            Message("this user may not use Docker"),
            remedy=Message("then log in again; whoever may use Docker can become root of this machine"),
            command=as_root("usermod -aG docker $USER", is_root=seen.is_root),
        )
    elif seen.docker.context:
        yield warn(
            Message("DOCKER_HOST names {context}, where no Docker answers", context=seen.docker.context),
            command="unset DOCKER_HOST",
        )
    else:
        yield warn(Message("Docker is installed, and its service does not run"), command=_start(seen, "start"))


def _start(seen: Symptoms, verb: str) -> str:
    if seen.host.system == "Darwin":
        return "open -a Docker"
    command = f"systemctl {verb} docker" if seen.systemd else f"service docker {verb}"
    return as_root(command, is_root=seen.is_root)


def parse_info(text: str) -> dict[str, Any]:
    """The JSON line of `docker info`, among warnings."""
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _engine(seen: Symptoms) -> dict[str, Any]:
    """What the Engine of this machine says of itself, if it answers and its containers are on the machine's network."""
    answer, context = seen.docker.info, seen.docker.context
    info = parse_info(answer.text) if answer is not None and answer.ok else {}
    rootless = "name=rootless" in str(info.get("SecurityOptions", ""))
    apart = rootless or "Docker Desktop" in str(info.get("OperatingSystem", ""))
    return {} if apart or (context and not context.startswith("unix:")) else info


def engine(seen: Symptoms) -> Iterator[Diagnosis]:
    """It keeps the network from what containers do not publish."""
    version = str(_engine(seen).get("ServerVersion", ""))
    major = re.match(r"[0-9]+", version)
    if major and int(major[0]) < FIRST_CLOSED:
        yield warn(
            Message(
                "Docker {version}: machines on the network may reach ports that containers publish on 127.0.0.1 only, "
                "or not at all",
                version=version,
            ),
            remedy=Message(
                "from Docker {first} on they cannot; if that finds no newer one, install Docker's own packages: "
                "docs.docker.com/engine/install",
                first=FIRST_CLOSED,
            ),
            command=as_root(
                "apt-get install -y --only-upgrade docker-ce docker-ce-cli containerd.io", is_root=seen.is_root
            ),
        )


def past_ufw(seen: Symptoms) -> Iterator[Diagnosis]:
    """No container publishes a port to everybody where ufw is to keep them away: Docker's rules come before ufw's."""
    answer = seen.docker.containers
    if not seen.firewalls.ufw_enabled or answer is None or not answer.ok or not _engine(seen):
        return
    if found := open_ports(answer.text):
        _, port, inner = found[0]
        names = ", ".join(f"{name} {port}" for name, port, _ in found[:MOST_NAMED])
        yield warn(
            Message(
                "the firewall ufw does not keep others from ports of containers: {ports}",
                ports=names + (", ..." if len(found) > MOST_NAMED else ""),
            ),
            remedy=Message('in a compose file: ports: ["127.0.0.1:{port}:{inner}"]', port=port, inner=inner),
            command=f"docker run -p 127.0.0.1:{port}:{inner} ...",
        )


def open_ports(listed: str) -> list[tuple[str, str, str]]:
    """Each once: the container's name, a port (or ports) on all addresses of this machine, the container's own."""
    found: dict[tuple[str, str, str], None] = {}
    for line in listed.splitlines():
        name, _, ports = line.partition("\t")
        for part in ports.split(","):
            outer, arrow, inner = part.strip().partition("->")
            host, _, port = outer.rpartition(":")
            try:
                everybody = ipaddress.ip_address(host.strip("[]")).is_unspecified
            except ValueError:
                continue
            if arrow and everybody:
                found[name, port, inner.partition("/")[0]] = None
    return list(found)


def cards(seen: Symptoms) -> Iterator[Diagnosis]:
    """Containers can use the card that this machine has."""
    answer, smi = seen.docker.info, seen.nvidia.smi
    if answer is None or not answer.ok or smi is None or not smi.ok or seen.host.container:
        return
    info = parse_info(answer.text)
    if "Docker Desktop" in str(info.get("OperatingSystem", "")):
        return  # under Windows it brings its own
    if "/snap/" in seen.docker.program:
        yield warn(
            Message("Docker comes from snap, whose containers do not see cards"),
            command=as_root("snap remove docker", is_root=seen.is_root),
            remedy=Message("then install Docker Engine: docs.docker.com/engine/install"),
        )
        return
    runtimes = info.get("Runtimes")
    if isinstance(runtimes, dict) and "nvidia" not in runtimes and not _has_cdi(info):
        cause = Message('containers cannot use the card: could not select device driver "nvidia"')
        if seen.docker.has_toolkit:
            yield warn(
                cause,
                remedy=Message("then restart Docker: {command}", command=_start(seen, "restart")),
                command=as_root("nvidia-ctk runtime configure --runtime=docker", is_root=seen.is_root),
                fixable=True,
            )
        else:
            yield warn(
                cause,
                remedy=Message("its packages: docs.nvidia.com/datacenter/cloud-native/container-toolkit"),
                command=as_root("apt-get install -y nvidia-container-toolkit", is_root=seen.is_root),
            )


def _has_cdi(info: dict[str, Any]) -> bool:
    devices = info.get("DiscoveredDevices")
    return isinstance(devices, list) and any("nvidia" in str(each) for each in devices)


def published(seen: Symptoms) -> Iterator[Diagnosis]:
    """A container with a network of its own is reached where its host lets others in. (A coordinator knows already.)"""
    if seen.reachability.kind == "container" and seen.port is not None and seen.port_state != "ours":
        yield warn(
            Message("others reach port {port} of this container only through its host", port=seen.port),
            remedy=Message(
                "{host} is the address of that machine on your network; "
                "the files of `cuadrilla compose` publish the port",
                host=HOST,
            ),
            command=f"docker run -p {HOST}:{seen.port}:{seen.port} ...",
            shell="host",
        )


def mac_host(seen: Symptoms) -> Iterator[Diagnosis]:
    """A container on a Mac has no GPU."""
    if seen.host.container and seen.host.machine in ("aarch64", "arm64") and "linuxkit" in (seen.host.kernel or ""):
        yield warn(
            Message("a container on a Mac has no GPU: the machine trains on its processor"),
            remedy=Message("run cuadrilla on the Mac itself, in a terminal"),
            command="make setup",
            shell="host",
        )


def shared_memory(seen: Symptoms) -> Iterator[Diagnosis]:
    """/dev/shm, which Ray and PyTorch's DataLoader workers use."""
    shm = seen.shm
    if shm is None or shm.total_bytes is None:
        return
    mib = shm.total_bytes / MIB
    if shm.total_bytes >= SMALLEST_SHM_BYTES:
        yield well(Message("/dev/shm has {mib:,.0f} MiB", mib=mib))
    elif seen.host.container in ("docker", "podman"):
        yield warn(
            Message("/dev/shm has {mib:,.0f} MiB; Ray and DataLoader workers stop with a bus error", mib=mib),
            remedy=Message("or in a compose file: shm_size: 2gb"),
            command="docker run --shm-size 2g ...",
            shell="host",
        )
    else:
        yield warn(
            Message("/dev/shm has {mib:,.0f} MiB; Ray and DataLoader workers stop with a bus error", mib=mib),
            command=as_root("mount -o remount,size=2G /dev/shm", is_root=seen.is_root),
            fixable=True,
        )
