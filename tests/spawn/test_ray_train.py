"""The examples of Ray and Ray Train as a user runs them: trained, continued, without a pickle."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import safe_open

from cuadrilla.rundir import last_rows
from tests.commands import is_what_one_worker_gives, make_run, run_program
from tests.ray_cluster import RayNode
from tests.spawn.test_examples import EXAMPLES, copy_examples, write_made_up_mnist

PYTHON = "CUADRILLA_TENSORFLOW_PYTHON"
NEEDS = ("pandas", "pyarrow", "tensorboardX")
missing = [name for name in ("ray", *NEEDS) if importlib.util.find_spec(name) is None]
needs_train = pytest.mark.skipif(bool(missing), reason=f'not installed: {", ".join(missing)}: pip install "ray[train]"')
needs_tensorflow = pytest.mark.skipif(
    PYTHON not in os.environ,
    reason=f'{PYTHON} does not name a Python with: pip install "ray[default,train]" tensorflow tf_keras safetensors',
)
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples, with 10,000 made-up images."""
    folder = copy_examples(tmp_path / "examples")
    write_made_up_mnist(folder / "mnist", held_out=10_000)
    return folder


def run_example(python: str, folder: Path, name: str, *, head: RayNode, epochs: int) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= head.environment() | {"RAY_ADDRESS": head.address}
    done = run_program(python, name, "--epochs", epochs, cwd=folder, env=environment, seconds=420)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_trained_and_continued(python: str, folder: Path, name: str, *, head: RayNode) -> Path:
    """The folder of the last checkpoint."""
    first = run_example(python, folder, name, head=head, epochs=1)
    assert first["accuracy"] > 0.9
    second = run_example(python, folder, name, head=head, epochs=2)  # one epoch more
    assert (first["epoch"], second["epoch"]) == (1, 2)
    checkpoints = sorted(Path(second["checkpoint"]).parent.glob("checkpoint_*/"))
    assert [str(path) for path in checkpoints] == [first["checkpoint"], second["checkpoint"]]
    for path in checkpoints:
        assert {file.suffix for file in path.iterdir()} <= {".safetensors", ".json"}
    with safe_open(checkpoints[-1] / "model.safetensors", framework="numpy") as model:
        assert sum(np.prod(model.get_slice(key).get_shape()) for key in model.keys()) == 206_922  # noqa: SIM118
    return checkpoints[-1]


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'
)
def test_the_parameter_server_learns_and_reserves() -> None:
    """One of the two pretended GPUs, and both CPUs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = run_program(sys.executable, "ray_parameter_server.py", 2, cwd=EXAMPLES, env=environment, seconds=300)
    learned, reserved = done.stdout.splitlines()[-2:]
    before, after = (float(loss) for loss in learned.removeprefix("loss ").split(" -> "))
    assert after < before / 2
    assert reserved.startswith("CPU: 2 of ")
    assert reserved.endswith("GPU: 1 of 2 reserved")


@needs_train
def test_ray_train_trains_the_cnn_and_continues(folder: Path, head: RayNode) -> None:
    last = is_trained_and_continued(sys.executable, folder, "ray_train_torch.py", head=head)
    with safe_open(last / "optimizer.safetensors", framework="numpy") as optimizer:
        assert optimizer.get_tensor("0.step") == 2 * 63  # 4,000 images of each worker, in batches of 64, twice


@needs_train
def test_the_ranks_of_ray_train_are_one_worker(tmp_path: Path, head: RayNode) -> None:
    run = make_run(tmp_path / "run", steps=20)
    with run.run_file.open("a") as file:
        file.write("[sync]\nstrict = true\n")
    done = run_program(*head.prefix, sys.executable, EXAMPLES / "ray_ranks.py", run.path, 2, seconds=420)
    assert "2 ranks, gloo" in done.stdout + done.stderr
    assert last_rows(run.metrics)[-1]["version"] == 20
    assert is_what_one_worker_gives(run)


@needs_tensorflow
def test_ray_train_trains_a_keras_model_and_continues(folder: Path, head: RayNode) -> None:
    is_trained_and_continued(os.environ[PYTHON], folder, "ray_train_tensorflow.py", head=head)


@needs_train
def test_the_cluster_s_file_has_the_form_that_ray_asks_for() -> None:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    schema = json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: it comes with ray")
    jsonschema.validate(yaml.safe_load((EXAMPLES / "ray-cluster.yaml").read_text()), schema)
