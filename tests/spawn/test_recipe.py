"""The recipe of a GPT-2 in Spanish: the commands of its guide, without containers."""

import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuadrilla.data.folder import read_manifest
from cuadrilla.rundir import RunDir, last_rows
from tests.commands import run_program, wait_for
from tests.ranks import finished, start_rank

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt2_spanish"
SMALL = ("--preset", "micro", "--batch-size", "6", "--seq-len", "32")
STEP_TOKENS = 6 * 32


@pytest.fixture
def workspace(tmp_path: Path, stories: Path) -> Path:
    """A folder like a container's /workspace: the recipe, and prepared text in ./Data."""
    for path in RECIPE.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    shutil.copytree(stories, tmp_path / "Data")
    return tmp_path


def with_python(**more: object) -> dict[str, str]:
    """The environment, in which `python` is the one that has cuadrilla, as in a container."""
    folder = os.path.dirname(sys.executable)
    own = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "LC_ALL": "C.UTF-8", "LANGUAGE": "en"}
    return {**os.environ, **own, **{name: str(value) for name, value in more.items()}}


def typed(workspace: Path, line: str, *arguments: str, code: int = 0, **environ: object) -> str:
    """Run a command, which must end with this exit code, and return its stderr."""
    return run_program(*line.split(), *arguments, cwd=workspace, env=with_python(**environ), code=code).stderr


def test_a_run_that_one_process_has_trained_goes_on_with_two_ranks(workspace: Path, port: int) -> None:
    """The one process is stopped first, as a container is, and has saved."""
    command = [sys.executable, "train_gpt2_spanish.py", *SMALL, "--epochs", "100"]
    process = subprocess.Popen(command, cwd=workspace, env=with_python(), text=True, stderr=subprocess.PIPE)
    run = RunDir(workspace / "checkpoints")
    try:
        wait_for(lambda: run.metrics.exists() and len(last_rows(run.metrics)) > 1, process)
        process.terminate()
        said = process.communicate(timeout=100)[1]
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in said
    steps = len(last_rows(run.metrics))
    assert f"v{steps:08d}" in os.listdir(run.checkpoints)
    epochs = (steps + 3) * STEP_TOKENS / read_manifest(workspace / "Data").splits["train"].num_tokens
    longer = typed(workspace, "./ddp_launch.sh", *SMALL, "--epochs", str(epochs), MASTER_PORT=port, GPUS_PER_NODE=2)
    assert f"resumed    at step {steps}" in longer
    assert "2 ranks, gloo" in longer
    assert "the run is complete at step" in longer
    versions = [row["version"] for row in last_rows(run.metrics)]
    assert versions == list(range(1, versions[-1] + 1))
    assert versions[-1] > steps
    assert list(run.tensorboard.iterdir()) != []


def test_an_empty_folder_is_filled_with_the_built_in_stories(workspace: Path) -> None:
    """A folder with other files is not filled. Ranks do not fill a missing one, since all of them would write it."""
    for path in (workspace / "Data").iterdir():
        path.unlink()
    said = typed(workspace, "python train_gpt2_spanish.py --epochs 0.01 --batch-size 2 --seq-len 128", LANGUAGE="es")
    assert "Data está vacía: los cuentos incluidos, cuentos:500" in said
    assert "micro" in said
    (workspace / "Data" / "manifest.json").unlink()
    said = typed(workspace, "python train_gpt2_spanish.py", LANGUAGE="es", code=4)
    assert "Data no tiene texto preparado" in said
    assert "cuadrilla data get quijote --to textos" in said
    assert "cuadrilla data prepare textos --out Data" in said
    shutil.rmtree(workspace / "Data")
    ranks = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    typed(workspace, "python train_gpt2_spanish.py", code=4, **ranks)
    assert not (workspace / "Data").exists()


def test_all_ranks_name_the_backend_and_the_right_sum(port: int) -> None:
    script = str(RECIPE / "test_ddp.py")
    ranks = [start_rank(rank, 2, port, script, "--backend", "auto") for rank in range(2)]
    said = finished(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for number, (out, _) in enumerate(said):
        assert f"rank {number} of 2: backend gloo (not every rank has a CUDA device of its own)" in out
        assert f"rank {number}: all_reduce gives 3, right is 3" in out
    assert "WORLD_SIZE=2" in typed(RECIPE, "python test_ddp.py --backend auto", code=2)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_shell_script_is_clean() -> None:
    run_program("shellcheck", RECIPE / "ddp_launch.sh")


def preflight(port: int, *numbers: int, machines: int, seconds: int = 30) -> list[tuple[int, str, str]]:
    """Run the preflight on these machines at once: exit code, stdout and stderr of each."""
    command = [sys.executable, str(RECIPE / "preflight.py"), "127.0.0.1", str(port), str(machines)]
    started = [
        subprocess.Popen(
            [*command, str(number), str(seconds)], env=with_python(TORCH_CPP_LOG_LEVEL="FATAL"), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for number in numbers
    ]  # fmt: skip
    said = finished(started)
    return [(process.returncode, *words) for process, words in zip(started, said, strict=True)]


def test_a_machine_that_does_not_come_is_named_to_all(port: int) -> None:
    for code, out, err in preflight(port, 0, 2, machines=3, seconds=1):
        assert (code, out) == (5, "")
        assert "machine 1 did not come in time" in err
        assert "cuadrilla up RUN --listen 127.0.0.1" in err
        assert "cuadrilla join" in err


def test_another_program_at_the_port_of_machine_0_is_waited_out(port: int) -> None:
    """For example torch's store, of a training that has just lost a machine."""
    with socket.create_server(("127.0.0.1", port)) as store, ThreadPoolExecutor() as pool:
        early = pool.submit(preflight, port, 1, machines=2, seconds=60)
        for _ in range(2):
            store.accept()[0].close()
        store.close()
        assert preflight(port, 0, machines=2) == [(0, "lo\n", "")]
        assert early.result() == [(0, "lo\n", "")]


def test_a_public_address_is_refused() -> None:
    said = typed(RECIPE, "./ddp_launch.sh", MASTER_ADDR="8.8.8.8", NNODES=2, NODE_RANK=1, code=5)
    assert "8.8.8.8 must be the private address of machine 0" in said
    assert "cuadrilla join" in said


def test_what_is_no_number_is_named() -> None:
    assert "'two'" in typed(RECIPE, "./ddp_launch.sh", NNODES="two", code=2)
