"""A group of processes that compute together, on one machine or several, and what each finds in its environment.

Several programs read the same variables: torch, Accelerate, DeepSpeed and Lightning those of torchrun; TensorFlow its
`TF_CONFIG`, in which each process has a port of its own. Pure but for `free_ports`.
"""

import ipaddress
import json
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from cuadrilla.errors import ConfigError, EnvironmentProblem

LOOPBACK = "127.0.0.1"
TORCH_PORT = 29500
"""torchrun's own; the processes of a machine have those behind it."""
MOST_PROCESSES = 256
"""Of a machine: each has two pipes, and a process may often open 1024 files."""
LARGEST_PORT = 2**16 - 1
FREE_PORTS = range(20_000, 32_000)
"""Linux, macOS and Windows give connections only numbers above."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """`addresses` and `processes`: of each machine, in the order of their numbers; `number`: of this one.

    `ports`: torch's, then one for each process of the machine that has most.
    """

    addresses: tuple[str, ...]
    processes: tuple[int, ...]
    ports: tuple[int, ...]
    number: int = 0

    @property
    def num_local(self) -> int:
        return self.processes[self.number]

    @property
    def num_ranks(self) -> int:
        return sum(self.processes)

    @property
    def first_rank(self) -> int:
        return sum(self.processes[: self.number])

    @property
    def meets_at(self) -> str:
        return _joined(self.addresses[0], self.ports[0])


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`cores`: that its processes share. `network_card`: the one that leads to the others."""

    cores: float
    has_gpu: bool
    network_card: str


def environment(group: Group, local_rank: int, machine: Machine, inherited: Mapping[str, str]) -> dict[str, str]:
    """All variables of one process. What its owner has set in `inherited` stays, but for what makes the group."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    fallback = {
        "OMP_NUM_THREADS": str(max(1, int(machine.cores) // group.num_local)),
        "PYTHONUNBUFFERED": "1",  # a line is shown when it is printed, though it goes through a pipe
    }
    if not machine.has_gpu and group.num_ranks > 1:
        fallback["ACCELERATE_USE_CPU"] = "true"  # without it Accelerate takes several processes on CPUs for strangers
    # Gloo and NCCL would take the card that has this machine's name, which others may not reach.
    card = {"GLOO_SOCKET_IFNAME": machine.network_card, "NCCL_SOCKET_IFNAME": f"={machine.network_card}"}
    return {**fallback, **kept, **card, **_place(group, local_rank)}


def _place(group: Group, local_rank: int) -> dict[str, str]:
    rank = group.first_rank + local_rank
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": group.num_ranks,
        "LOCAL_WORLD_SIZE": group.num_local,
        "GROUP_RANK": group.number,
        "GROUP_WORLD_SIZE": len(group.addresses),
        "NODE_RANK": group.number,
        "MASTER_PORT": group.ports[0],
    }
    named = {name: str(number) for name, number in numbers.items()}
    return {**named, "MASTER_ADDR": group.addresses[0], "TF_CONFIG": json.dumps(tf_config(group, rank))}


def tf_config(group: Group, rank: int) -> dict[str, object]:
    """What tf.distribute reads: the address of every process, and which one this is."""
    workers = [
        _joined(address, port)
        for address, num_processes in zip(group.addresses, group.processes, strict=True)
        for port in group.ports[1 : num_processes + 1]
    ]
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# -- what is typed -----------------------------------------------------------------------------------------------------


def parse_hosts(text: str) -> tuple[str, ...]:
    """Addresses with commas between. Raises ConfigError.

    Numbers only: a machine's own name is a loopback address on that machine, and all must write the same.
    """
    found = [part.strip() for part in text.split(",")]
    for part in found:
        try:
            ipaddress.ip_address(part)
        except ValueError:
            hint = "numbers with commas between, such as --hosts 192.168.1.50,192.168.1.51"
            raise ConfigError("--hosts: {part!r} is not the number of an address", part=part, hint=hint) from None
    addresses = tuple(str(ipaddress.ip_address(part)) for part in found)
    if len(addresses) < 2 or len(set(addresses)) < len(addresses):
        raise ConfigError(
            "--hosts names {number} different machines",
            number=len(set(addresses)),
            hint="each of the machines once; without --hosts it is this one alone",
        )
    return addresses


def parse_processes(text: str, *, machines: int) -> tuple[int, ...]:
    """One number for all machines, or one for each. Raises ConfigError."""
    counts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) <= MOST_PROCESSES for part in counts):
        raise ConfigError(
            "--processes {text!r} is no number from 1 to {most}",
            text=text,
            most=MOST_PROCESSES,
            hint="--processes 2; on several machines also one number for each: --processes 2,1",
        )
    if len(counts) not in (1, machines):
        raise ConfigError(
            "--processes has {counts} numbers, and there are {machines} machines",
            counts=len(counts),
            machines=machines,
            hint="one number for all, or one for each machine of --hosts",
        )
    return tuple(map(int, counts * machines if len(counts) == 1 else counts))


def ports_from(first: int, processes: Sequence[int]) -> tuple[int, ...]:
    """The same on all machines. Raises ConfigError."""
    last = first + max(processes)
    if last > LARGEST_PORT:
        raise ConfigError(
            "--master-port {first} leaves no ports for {number} processes",
            first=first,
            number=max(processes),
            hint="a lower one, such as --master-port {usual}",
            usual=TORCH_PORT,
        )
    return tuple(range(first, last + 1))


def free_ports(number: int) -> tuple[int, ...]:
    """Of the loopback, and none that a connection would be given before a process listens there, seconds later.

    Raises EnvironmentProblem.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
            if len(found) == number:
                break
            with suppress(OSError):
                stack.enter_context(socket.create_server((LOOPBACK, port)))
                found.append(port)
    if len(found) < number:
        raise EnvironmentProblem(
            "this machine has no free ports", hint="end what listens on them, or give --master-port"
        )
    return tuple(found)
