"""The image by itself, and the recipes that are written for such images: one network, Ray, Dask, torch's processes."""

import json
from pathlib import Path

import pytest

from cuadrilla.version import __version__
from tests.docker.conftest import Containers
from tests.images import ROOT, docker

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

LIBRARIES = """
import json, importlib.metadata as installed, matplotlib.pyplot, pandas, sklearn, tensorboard, torch
names = ("cuadrilla", "torch", "ray", "dask", "distributed", "scikit-learn", "pandas", "matplotlib", "gpustat")
print(json.dumps({name: installed.version(name) for name in names}))
"""
BOTH_NODES = """
import ray, time
while not ray.is_initialized():
    try:
        ray.init(address="auto", logging_level="error")
    except (ConnectionError, RuntimeError) as error:  # it has only just begun
        print(type(error).__name__, error)
        time.sleep(0.5)
while sum(name.startswith("node:1") for name in ray.cluster_resources()) < 2:
    time.sleep(0.2)
print("both")
"""
THROUGH_DASK = """
from dask.distributed import Client
with Client("scheduler:8786") as client:
    print(client.submit(sum, [20, 22]).result())
"""
SPAWN = """
import torch.multiprocessing as mp

def train(rank):
    print(f"Proceso {rank} entrenando")

if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""


def test_what_is_in_it_for_a_user_without_rights(containers: Containers) -> None:
    bound = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp")
    shell = "command -v python cuadrilla git; ping -c 1 127.0.0.1 > /dev/null && cuadrilla-healthy && id -u"
    found = containers.run("bash", "-lc", shell, options=(*bound, "--user", "4321:4321")).split()
    assert found == ["/opt/venv/bin/python", "/opt/venv/bin/cuadrilla", "/usr/bin/git", "4321"]
    versions = json.loads(containers.run("python", "-c", LIBRARIES))
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert versions["cuadrilla"] == __version__
    assert versions["torch"] == f"{pins['torch']}+cpu"
    assert versions["ray"] == pins["ray"]
    assert containers.run("id", "-u") == "1000"


def test_ray_on_a_network_of_containers(containers: Containers) -> None:
    """Without `--block` the command returns, and the container ends with it."""
    returns = containers.start("other-head", "ray", "start", "--head", "--port=6379")
    head = containers.start("ray-head", "ray", "start", "--head", "--port=6379", "--block")
    waits = "until (: < /dev/tcp/ray-head/6379) 2> /dev/null; do sleep 0.2; done"
    containers.start("ray-worker", "bash", "-c", f"{waits}; exec ray start --address=ray-head:6379 --block")
    assert docker("exec", head, "timeout", "150", "python", "-c", BOTH_NODES).splitlines()[-1] == "both"
    assert docker("wait", returns) == "0"
    assert "Ray runtime started" in docker("logs", returns)


def test_dask_and_processes_of_torch(containers: Containers, tmp_path: Path) -> None:
    containers.start("scheduler", "dask", "scheduler")
    containers.start("dask-worker", "dask", "worker", "tcp://scheduler:8786", "--nthreads", "1")
    (tmp_path / "spawn.py").write_text(SPAWN)
    (tmp_path / "spawn.py").chmod(0o644)
    here = ("--volume", f"{tmp_path / 'spawn.py'}:/workspace/spawn.py:ro")
    assert sorted(containers.run("python", "spawn.py", options=here).splitlines()) == [
        "Proceso 0 entrenando",
        "Proceso 1 entrenando",
    ]
    assert containers.run("python", "-c", THROUGH_DASK) == "42"
