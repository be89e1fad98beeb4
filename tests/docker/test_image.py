"""The image without compose."""

import json

import pytest

from cuadrilla.version import __version__
from tests.docker.conftest import Containers
from tests.images import ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

LIBRARIES = """
import json, importlib.metadata as installed, matplotlib.pyplot, pandas, sklearn, tensorboard, torch
names = ("cuadrilla", "torch", "ray", "dask", "distributed", "scikit-learn", "pandas", "matplotlib", "gpustat")
print(json.dumps({name: installed.version(name) for name in names}))
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
