"""The examples as a user runs them, in a copied folder, also with hostile data files."""

import gzip
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cuadrilla.data import cuentos
from cuadrilla.errors import DataError
from tests.commands import run_program
from tests.inside import cuadrilla
from tests.ports import free_port
from tests.ranks import TORCHRUN
from tests.runs import newest

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "t10k-labels-idx1-ubyte.gz"
CREW = ("--practice", "1.0,0.5")
NEEDS_SKLEARN = "scikit-learn is not installed: mnist_cnn.py:digits takes its images from there"


def copy_examples(folder):
    """A copy of the examples as git has them, without data and without results of a training."""
    folder.mkdir()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".toml"):
            shutil.copy(path, folder)
    return folder


def train(run_file, *sets, crew=(), code):
    """Train with a single evaluation, at the end, and with one thread, as tests run side by side."""
    arguments = [
        part for value in ("evaluate.every_tokens=1_000_000_000", "train.threads=1", *sets) for part in ("--set", value)
    ]
    return cuadrilla("--json", "train", run_file, *crew, *arguments, code=code)


def trained(run_file, *sets, crew=()):
    return json.loads(train(run_file, *sets, crew=crew, code=0).stdout)


def idx(array):
    """`array` as an idx file of unsigned bytes."""
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_made_up_mnist(folder, *, held_out=200):
    """The four files, small and not compressed. A digit is the position of a grey square in noise."""
    folder.mkdir()
    random = np.random.default_rng(0)
    squares = np.zeros((10, 28, 28))
    for digit in range(10):
        top, left = digit // 5 * 14 + 4, digit % 5 * 5 + 1
        squares[digit, top : top + 6, left : left + 5] = 150
    for split, count in (("train", 512), ("t10k", held_out)):
        digits = random.integers(0, 10, count)
        images = squares[digits] + random.uniform(0, 100, (count, 28, 28))
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(digits))


# -- trained ---------------------------------------------------------------------------------------------------------


def test_the_mlp_learns(tmp_path):
    """A model that always says 0 has a loss of 0.52, the best linear one 0.068."""
    last = trained(copy_examples(tmp_path / "mlp") / "mlp.toml", "train.epochs=2.0", crew=CREW)
    assert last["complete"]
    assert last["val_loss"] < 0.05


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason=NEEDS_SKLEARN)
def test_the_cnn_learns_the_digits_of_scikit_learn(tmp_path):
    run_file = copy_examples(tmp_path / "digits") / "mnist.toml"
    last = trained(run_file, 'task.path="mnist_cnn.py:digits"', "train.steps=60", "train.epochs=0.0")
    assert last["val_accuracy"] > 0.6  # 0.1 without learning


def test_fine_tuning_changes_the_new_layer_alone(tmp_path):
    digits, parity = (copy_examples(tmp_path / name) for name in ("digits", "parity"))
    for folder in (digits, parity):
        write_made_up_mnist(folder / "mnist", held_out=8200)
    short = ("train.epochs=0.0", "evaluate.sequences=100")
    trained(digits / "mnist.toml", 'task.path="mnist_cnn.py:mnist_10k"', "train.steps=10", *short, crew=CREW)
    assert "pretrained.safetensors does not exist" in train(parity / "finetune.toml", code=4).stderr
    before = newest(digits)
    shutil.copy(before.path / "model.safetensors", parity / "mnist" / "pretrained.safetensors")
    last = trained(parity / "finetune.toml", "train.steps=20", *short, crew=CREW)
    assert last["val_accuracy"] > 0.6  # 0.5 without learning
    after = newest(parity)
    changed = {name for name, tensor in after.model.items() if not torch.equal(tensor, before.model[name])}
    assert changed == {"9.weight", "9.bias"}


def test_the_tagger_finds_people_it_has_never_met(tmp_path):
    last = trained(copy_examples(tmp_path / "tags") / "tagging.toml")
    assert last["val_accuracy"] > 0.98  # 0.91 when nobody is a person


CONLLU = "# text = Del mar .\n1-2\tDel\t_\t_" + "\t_" * 6 + "\n"
for number, (form, tag) in enumerate((("De", "ADP"), ("el", "DET"), ("mar", "NOUN"), (".", "PUNCT")), start=1):
    CONLLU += f"{number}\t{form}\t_\t{tag}" + "\t_" * 6 + "\n"


def test_a_treebank_is_read_and_a_broken_one_named(tmp_path):
    folder = copy_examples(tmp_path / "tags")
    treebank = folder / "treebank"
    treebank.mkdir()
    (treebank / "train.conllu").write_text(f"{CONLLU}\n" * 40)
    (treebank / "val.conllu").write_text(f"{CONLLU}\n" * 8)
    sets = ('task.path="tagging.py:conllu"', 'task.data="treebank"', "train.epochs=0.0", "train.steps=10")
    assert trained(folder / "tagging.toml", *sets)["val_accuracy"] > 0.9  # four words, four tags
    (treebank / "val.conllu").write_text(CONLLU + "5\tpart\n")
    done = train(folder / "tagging.toml", *sets, code=4)
    assert "val.conllu:7 is not CoNLL-U" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_character_model_learns_ones_own_text(tmp_path):
    folder = copy_examples(tmp_path / "text")
    assert "0 characters in 0 .txt files" in train(folder / "own_text.toml", code=4).stderr
    (folder / "texts").mkdir()
    (folder / "texts" / "stories.txt").write_text("\n".join(cuentos.stories(100)), encoding="utf-8")
    last = trained(folder / "own_text.toml", "train.epochs=0.0", "train.steps=12")
    assert last["val_bits_per_character"] < 4.2  # 6.0 for all characters alike


# -- processes by hand -----------------------------------------------------------------------------------------------


def printed(folder, *command):
    """Run a script of the examples, and return its output."""
    return run_program(sys.executable, *command, cwd=folder, seconds=250).stdout


def losses(text):
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if "held-out loss" in line]


def test_spawned_processes_learn_and_have_the_same_weights(tmp_path):
    folder = copy_examples(tmp_path / "spawn")
    two, one = (printed(folder, "mp_spawn.py", "--nprocs", count, "--epochs", 2) for count in (2, 1))
    hashes = [line.split()[-1] for line in two.splitlines() if line.startswith("process")]
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    assert losses(two) == pytest.approx(losses(one), abs=2e-4)  # printed with four digits; sums in another order
    assert losses(two)[-1] < 0.05  # 0.52 without learning, 0.068 for the best linear model


def test_the_example_with_torch():
    text = printed(EXAMPLES / "launch", *TORCHRUN[1:], "--nproc-per-node", 2, "torch_ddp.py")
    assert "2 processes, weights differ by 0" in text
    losses = [float(loss) for loss in re.findall(r"step 200/200  loss of this part (\d\.\d+)", text)]
    assert len(losses) == 2
    assert max(losses) < 0.1  # 0.44 for a model that always says 0


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_the_example_with_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    text = printed(EXAMPLES / "launch", *TORCHRUN[1:], "--nproc-per-node", 2, "with_accelerate.py")
    assert "2 processes, MULTI_CPU" in text
    assert text.count("epoch 4/4  32 batches here") == 2
    launcher = "accelerate.commands.launch"
    assert "1 processes, NO" in printed(EXAMPLES / "launch", "-m", launcher, "--cpu", "with_accelerate.py")


def test_the_example_with_tensorflow(monkeypatch, port):
    interpreter = os.environ.get("CUADRILLA_TENSORFLOW_PYTHON")
    if not interpreter:
        pytest.skip("CUADRILLA_TENSORFLOW_PYTHON is not set: the Python of an environment with tensorflow-cpu")
    cluster = {"worker": [f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"]}
    environs = (
        {**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
        for index in range(2)
    )
    command, folder = [interpreter, "with_tensorflow.py"], EXAMPLES / "launch"
    started = [subprocess.Popen(command, cwd=folder, env=environ, stdout=-1, text=True) for environ in environs]
    said = [process.communicate(timeout=150)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert all("epoch 4/4  32 steps" in text for text in said)
    (total,) = {text.splitlines()[-1] for text in said}
    assert total.startswith("2 processes, weights sum to")


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="Dask is not installed")
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason=NEEDS_SKLEARN)
@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is not installed")
def test_a_search_on_a_cluster_of_this_machine_and_an_ensemble(tmp_path):
    folder = copy_examples(tmp_path / "ensemble")
    lines = printed(folder, "ensemble_dask.py", "--trials", 6, "--together", 3).splitlines()
    assert [line.split()[0] for line in lines[:6]] == [*"012345"]
    *each, together = (float(re.search(r"accuracy (0\.\d+)", line)[1]) for line in lines[6:])
    assert together > sum(each) / len(each) > 0.7  # 0.1 by chance
    again = printed(folder, "ensemble_dask.py", "--trials", 6).splitlines()
    assert again == lines[6:], "the study is complete: nothing more is tried"


# -- downloaded ------------------------------------------------------------------------------------------------------


def test_the_right_file_is_kept_and_not_asked_for_again(tmp_path):
    spec = importlib.util.spec_from_file_location("example_mnist_data", EXAMPLES / "mnist_data.py")
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    labels = gzip.compress(idx(np.arange(50) % 10), mtime=0)
    (tmp_path / NAME).write_bytes(labels)
    folder, url = tmp_path / "new" / "mnist", f"{tmp_path.as_uri()}/"
    with pytest.raises(DataError, match="are not this file of MNIST"):
        data.find(NAME.removesuffix(".gz"), folder=folder, url=url)
    data.SHA256[NAME] = data.hashlib.sha256(labels).hexdigest()
    path = data.find(NAME.removesuffix(".gz"), folder=folder, url=url)
    assert [file.name for file in folder.iterdir()] == [NAME]
    assert path.read_bytes() == labels
    assert list(data.read_idx(path, num_dimensions=1)) == [number % 10 for number in range(50)]
    assert data.find(NAME.removesuffix(".gz"), folder=folder, url="file:///nowhere/") == path
