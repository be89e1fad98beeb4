"""A crew as containers: compose.yaml, its override for NVIDIA cards, and the .env of one machine.

The two YAML files are the same everywhere; what differs from one machine to another is a variable of .env. Compose v2
and docker-compose 1.29.2 read both: there is no name at the top, no `include` and no `gpus:`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message

COMPOSE, GPU, ENV = "compose.yaml", "compose.gpu.yaml", ".env"
DOCKERFILE = "docker/Dockerfile"
ROLES = {
    "ingest": Message("makes token shards of the text in ./textos"),
    "coordinator": Message("holds the weights of the run, deals out the work and works; the crew's port"),
    "worker": Message("works for the coordinator; any number, each may die; no port"),
    "trainer": Message("trains alone; any other command: `docker compose run --rm trainer ...`"),
    "tensorboard": Message("curves of all runs, at http://127.0.0.1:6006"),
    "ray": Message("ray-head and ray-worker, for programs of your own; http://127.0.0.1:8265, with token"),
    "serve": Message("replica-1, replica-2 and their gateway: OpenAI's API at http://127.0.0.1:8001, with a key"),
    "monitor": Message("dashboard, at http://127.0.0.1:8047, Prometheus and Grafana, at http://127.0.0.1:3000"),
    "dask": Message("scheduler and dask-worker, for programs of your own; http://127.0.0.1:8787, no token"),
}
"""By profile of compose.yaml: what its services do."""
ADDED = "# Added by hand."
NOT_IN_QUOTES = ("'", "\\", "\n", "\r")


@dataclass(frozen=True, kw_only=True)
class ContainerHost:
    """What a .env says. `source`: the checkout that images are built from. `address`: this machine's on its network.
    `run`: the run folder. Both folders as seen from the files.
    """

    roles: Sequence[str]
    source: str
    address: str
    uid: int
    gid: int
    run: str
    gpu: bool


def compose_files(machine: ContainerHost) -> dict[str, str]:
    """Text by file name. Raises ConfigError."""
    for role in machine.roles:
        if role not in ROLES:
            raise ConfigError("there is no role {role!r}", role=role, hint="use {roles}", roles=", ".join(ROLES))
    here = resources.files("cuadrilla.engines")
    files = {name: (here / name).read_text(encoding="utf-8") for name in (COMPOSE, GPU)}
    return {**files, ENV: env_text(machine)}


def env_text(machine: ContainerHost) -> str:
    """Raises ConfigError."""
    chosen = f"{COMPOSE}:{GPU}" if machine.gpu else COMPOSE
    return f"""\
# Of this machine, for {COMPOSE}. Written by `cuadrilla compose`.

# The files that hold. With an NVIDIA card that Docker knows: {COMPOSE}:{GPU}
COMPOSE_PATH_SEPARATOR=:
COMPOSE_FILE={chosen}

# The roles that `docker compose up` starts: {", ".join(ROLES)}
COMPOSE_PROFILES={",".join(machine.roles)}

# Whose files the containers write.
UID={machine.uid}
GID={machine.gid}

# This machine's address on its network, which other machines of the crew dial: the crew's port is open on it alone.
LAN_ADDRESS={machine.address}

# The run folder, beside this file.
CUADRILLA_RUN={_quoted(machine.run)}

# A checkout of cuadrilla: what the image is built from.
CUADRILLA_SOURCE={_quoted(machine.source)}
"""


def with_added(text: str, old: str) -> str:
    """A new .env, and the variables that somebody has added to the old one: another port, another base image."""
    ours = {_name(line) for line in text.splitlines()}
    kept = [line for line in old.splitlines() if _name(line) and _name(line) not in ours]
    return f"{text}\n{ADDED}\n" + "".join(f"{line}\n" for line in kept) if kept else text


def _name(line: str) -> str:
    """Of the variable in a line, or nothing."""
    name, is_set, _ = line.partition("=")
    return name.strip() if is_set and not name.lstrip().startswith("#") else ""


def _quoted(value: str) -> str:
    """A value in which nothing is replaced; there is no escape that all versions read. Raises ConfigError."""
    if any(character in value for character in NOT_IN_QUOTES):
        raise ConfigError(
            "{value!r} cannot be written in {file}",
            value=value,
            file=ENV,
            hint="use a path without quotation marks and backslashes",
        )
    return f"'{value}'"
