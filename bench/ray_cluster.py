"""A Ray cluster on the machines of `bench.lan`: its head where the coordinator is, a node for each other machine.

As the product makes them (`cuadrilla up`, `cuadrilla join`), but for the enrolment: head and nodes meet by a file.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from cuadrilla.engines.courtesy import Courtesy, Manners
from cuadrilla.engines.ray.cluster import NAME_LABEL, Cluster, short_folder, started
from cuadrilla.engines.ray.node import Head, RayNode
from cuadrilla.home import Home
from cuadrilla.plan.devices import uses_of
from cuadrilla.rundir import private_folder

JOIN_SECONDS, LOOK_SECONDS = 120.0, 0.2


@contextmanager
def head(folder: Path, *, address: str) -> Iterator[Cluster]:
    """Ray's own imports come after this: it reads its environment when it is imported."""
    with started(host=address, num_workers=0, practice=False, dashboard=False) as cluster:
        (folder / "head.json").write_text(json.dumps({"address": cluster.address, "token": cluster.token}))
        yield cluster


class RayMachine:
    """A machine that is a node of the cluster, whose head is there: it does what Ray does on it.

    Ready when its raylet runs.
    """

    def __init__(self, *, folder: str, name: str, own_address: str, **_: Any) -> None:
        found = json.loads((Path(folder) / "head.json").read_text())
        self._open = ExitStack()
        own = self._open.enter_context(private_folder(where=short_folder()))
        uses = uses_of(["cpu"], cores=1)
        place = Head(address=found["address"], token=found["token"], mine=own_address)
        courtesy = Courtesy(Manners(), home=Home.of_user())
        self._node = RayNode(place, name=name, uses=uses, courtesy=courtesy, folder=own)
        deadline = time.monotonic() + JOIN_SECONDS
        while not has_raylet():
            if not self._node.look() or time.monotonic() > deadline:
                raise SystemExit(f"Ray did not start on {name}")
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        self._node.stop()
        self._open.close()


def has_raylet() -> bool:
    """Whether Ray's process for a node listens below this one."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            given = dict(word.split("=", 1) for word in child.cmdline() if "=" in word)
            if (socket := given.get("--raylet_socket_name")) and Path(socket).exists():
                return True
    return False


def nodes_named(names: Sequence[str]) -> dict[str, str]:
    """Ray's ids of these nodes, once all are there."""
    import ray

    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        there = {node["Labels"].get(NAME_LABEL): node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if there.keys() >= set(names):
            return {name: there[name] for name in names}
        if time.monotonic() > deadline:
            raise SystemExit(f"not all machines became nodes of Ray: {sorted(filter(None, there))}")
        time.sleep(LOOK_SECONDS)


def start_actor(actor_class: type, *arguments: Any, node: str) -> Any:
    """An actor of a subclass of the product's worker, on that node; `ask` has a thread of its own."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cuadrilla.engines.ray.worker import GROUPS

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    made = ray.remote(concurrency_groups={**GROUPS, "ask": 1})(actor_class)
    return made.options(num_cpus=0, scheduling_strategy=place).remote(*arguments)
