"""Checks of Docker: its service answers, lends the card, and what a container lacks that runs here.

Docker is needed for compose.yaml only, so that nothing here is more than a warning where it is absent.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from cuadrilla.doctor.diagnosis import Diagnosis, ok, warn
from cuadrilla.doctor.here import PROGRAM_SECONDS, Here
from cuadrilla.doctor.nvidia import smi
from cuadrilla.host.programs import ProgramAnswer
from cuadrilla.messages import Message


def service(here: Here) -> Iterator[Diagnosis]:
    """`docker info` answers."""
    answer, context = _info(here), here.environ.get("DOCKER_HOST", "")
    if answer is None or (here.host.container and not answer.ok and not context):
        return
    info = parse_info(answer.text)
    if answer.ok and info.get("ServerVersion"):
        system = str(info.get("OperatingSystem", ""))
        yield ok(Message("Docker {version} ({system})", version=str(info["ServerVersion"]), system=system))
    elif answer.code is None:
        cause = Message("Docker does not answer within {seconds:g} s", seconds=PROGRAM_SECONDS)
        yield warn(cause, command=_start(here, "restart"))
    elif "permission denied" in answer.text.lower():
        yield warn(
            Message("this user may not use Docker"),
            remedy=Message("then log in again; whoever may use Docker can become root of this machine"),
            command=here.as_root("usermod -aG docker $USER"),
        )
    elif context:
        cause = Message("DOCKER_HOST names {context}, where no Docker answers", context=context)
        yield warn(cause, command="unset DOCKER_HOST")
    else:
        yield warn(Message("Docker is installed, and its service does not run"), command=_start(here, "start"))


def _info(here: Here) -> ProgramAnswer | None:
    return here.run("docker", "info", "--format", "{{json .}}")


def _start(here: Here, verb: str) -> str:
    if here.host.system == "Darwin":
        return "open -a Docker"
    has_systemd = os.path.isdir("/run/systemd/system")
    return here.as_root(f"systemctl {verb} docker" if has_systemd else f"service docker {verb}")


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


def cards(here: Here, *, which: Callable[[str], str | None] = shutil.which) -> Iterator[Diagnosis]:
    """Containers can use the card that this machine has."""
    answer, said = _info(here), smi(here)
    info = parse_info(answer.text) if answer and answer.ok and said and said.ok else {}
    if not info or here.host.container or "Docker Desktop" in str(info.get("OperatingSystem", "")):
        return  # Docker Desktop brings its own
    if "/snap/" in (which("docker") or ""):
        yield warn(
            Message("Docker comes from snap, whose containers do not see cards"),
            command=here.as_root("snap remove docker"),
            remedy=Message("then install Docker Engine: docs.docker.com/engine/install"),
        )
    elif "nvidia" not in str(info.get("Runtimes", "")) + str(info.get("DiscoveredDevices", "")):
        has_toolkit = which("nvidia-ctk") is not None
        yield warn(
            Message('containers cannot use the card: could not select device driver "nvidia"'),
            remedy=Message("then restart Docker: {command}", command=_start(here, "restart"))
            if has_toolkit
            else Message("its packages: docs.nvidia.com/datacenter/cloud-native/container-toolkit"),
            command=here.as_root(
                "nvidia-ctk runtime configure --runtime=docker"
                if has_toolkit
                else "apt-get install -y nvidia-container-toolkit"
            ),
        )


def mac_host(here: Here) -> Iterator[Diagnosis]:
    """A container on a Mac has no GPU."""
    if here.host.container and here.host.machine in ("aarch64", "arm64") and "linuxkit" in (here.host.kernel or ""):
        yield warn(
            Message("a container on a Mac has no GPU: the machine trains on its processor"),
            remedy=Message("run cuadrilla on the Mac itself, in a terminal"),
            command="make setup",
            shell="host",
        )
