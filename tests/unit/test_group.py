"""What each process of a group finds in its environment, and what is refused of what was typed."""

import json

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.host.group import (
    Group,
    Machine,
    environment,
    free_ports,
    parse_hosts,
    parse_processes,
    ports_from,
)

TWO = Group(addresses=("10.0.0.1", "fd00::2"), processes=(2, 1), ports=(29500, 29501, 29502), number=1)
CPU = Machine(cores=8, has_gpu=False, network_card="eth1")


def test_ranks_are_counted_over_the_machines_before() -> None:
    found = environment(TWO, 0, CPU, {})
    assert {name: found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert (found["GROUP_RANK"], found["NODE_RANK"], found["GROUP_WORLD_SIZE"]) == ("1", "1", "2")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:29501", "10.0.0.1:29502", "[fd00::2]:29501"]},
        "task": {"type": "worker", "index": 2},
    }
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")


def test_what_the_owner_has_set_stays_but_for_what_makes_the_group() -> None:
    own = {"OMP_NUM_THREADS": "3", "ACCELERATE_USE_CPU": "false", "RANK": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = environment(TWO, 0, CPU, {**own, "HOME": "/home/eva"})
    assert (found["OMP_NUM_THREADS"], found["ACCELERATE_USE_CPU"], found["RANK"]) == ("3", "false", "2")
    assert found["HOME"] == "/home/eva"
    assert not [name for name in found if name.startswith("TORCHELASTIC")]


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(8, 2, "4"), (8, 3, "2"), (1.5, 1, "1"), (0.5, 1, "1"), (2, 5, "1")]
)
def test_processes_share_the_cores(cores: float, processes: int, threads: str) -> None:
    group = Group(addresses=("127.0.0.1",), processes=(processes,), ports=tuple(range(1, processes + 2)))
    machine = Machine(cores=cores, has_gpu=False, network_card="lo")
    assert environment(group, processes - 1, machine, {})["OMP_NUM_THREADS"] == threads


def test_accelerate_is_told_of_the_cpu_only_where_several_have_no_card() -> None:
    alone = Group(addresses=("127.0.0.1",), processes=(1,), ports=(1, 2))
    card = Machine(cores=8, has_gpu=True, network_card="eth1")
    told = [environment(group, 0, machine, {}) for group, machine in ((TWO, CPU), (TWO, card), (alone, CPU))]
    assert [each.get("ACCELERATE_USE_CPU") for each in told] == ["true", None, None]


def test_addresses_are_read_in_their_usual_form() -> None:
    assert parse_hosts("192.168.1.50, FD00:0::0002") == ("192.168.1.50", "fd00::2")
    assert parse_processes("2", machines=3) == (2, 2, 2)
    assert parse_processes("2, 1", machines=2) == (2, 1)
    assert ports_from(29500, (1, 2)) == (29500, 29501, 29502)


@pytest.mark.parametrize(
    "text",
    [
        "192.168.1.50",
        "pc,192.168.1.50",
        "10.0.0.1,10.0.0.1",
        "10.0.0.1,",
        "10.0.0.1:29500,10.0.0.2",
        "fd00::2,fd00:0::2",
    ],
)
def test_hosts_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1,2,3", "²", "257", "2,", "99999999999999999999"])
def test_processes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--processes"):
        parse_processes(text, machines=2)


def test_ports_end_somewhere() -> None:
    with pytest.raises(ConfigError, match="leaves no ports for 2 processes"):
        ports_from(65534, (1, 2))


def test_free_ports_are_different_ones() -> None:
    assert len(set(free_ports(20))) == 20
