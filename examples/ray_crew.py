"""A worker of your crew on each machine of a Ray cluster: Ray places it, reserves for it, and starts a dead one again.

    cuadrilla up run --set 'engine.workers=[]' --uses 8 | python ray_crew.py    # on a machine of the cluster
    cuadrilla invite --uses 8 | ssh HEAD python ray_crew.py                     # coordinated here, outside of it

On each machine it types `cuadrilla join` with the invite, and with the options that you give (`--name lab`). A worker
uses all that it reserves: the cards of its machine, or else its processors. To use only some machines, start Ray there
with `--resources='{"cuadrilla": 1}'`. Ctrl-C here ends the workers; by itself it ends when the run does.

A machine that enters the cluster later gets a worker as well. If the invite no longer holds for it (after 15 minutes),
its worker says so: then type Ctrl-C, and the same again with a new invite; those that have joined come back without
one. A run with code of your own is refused on every machine at first. Read that code, then add `--trust HASH`.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cuadrilla.home import Home
from cuadrilla.link.invite import Invite


@ray.remote(max_restarts=5, max_task_retries=5)
class Worker:
    """The actor of a machine. If its process dies, Ray starts another one there and calls `work` again."""

    def work(self, invite: Invite, trusted: str, options: list[str]) -> int:
        """Work until the run ends; return the exit code of `cuadrilla join`."""
        # A home for this crew on this machine: it is asked for an invite once, and dials no crew joined earlier.
        home = Home.of_user().path / "ray" / invite.key_hash.hex()[:16] / socket.gethostname()

        def join(*words: str) -> int:
            """It ends with this process."""
            command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "cuadrilla", "join", *words]
            there = {**os.environ, "CUADRILLA_HOME": str(home)}
            return subprocess.run(command, input=str(invite), text=True, env=there, check=False).returncode

        if trusted:
            join("--trust", trusted)
        code = join(str(invite.address), *options)
        if code < 0:  # it was killed, and Ray counts this as a death
            os._exit(1)
        return code


def machines() -> list[dict[str, Any]]:
    """The cluster's machines with processors or cards, or only those of them that offer the resource `cuadrilla`."""
    able = [node for node in ray.nodes() if node["Alive"] and {"CPU", "GPU"} & node["Resources"].keys()]
    return [node for node in able if "cuadrilla" in node["Resources"]] or able


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trust", default="", metavar="HASH", help="approve this code on every machine")
    given, options = parser.parse_known_args()
    invite = Invite.parse(sys.stdin.readline())
    ray.init(address="auto")
    known, working = set(), {}
    with suppress(KeyboardInterrupt):
        while working or not known:
            for node in machines():
                if node["NodeID"] not in known:
                    known.add(node["NodeID"])
                    cards, cores = (node["Resources"].get(name, 0) for name in ("GPU", "CPU"))
                    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    reserves = {"num_gpus": cards, "num_cpus": 0 if cards else cores}
                    actor = Worker.options(scheduling_strategy=there, **reserves).remote()
                    working[actor.work.remote(invite, given.trust, ["--threads", str(int(cores)), *options])] = actor
            time.sleep(1)
            for ended in ray.wait(list(working), num_returns=len(working), timeout=0)[0]:
                del working[ended]  # others may have what it reserved


if __name__ == "__main__":
    main()
