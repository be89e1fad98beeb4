"""A small language model, trained for three steps on the built-in stories, for tests that use a trained model."""

from pathlib import Path

from cuadrilla.crew.run import train_run
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_file

RUN_FILE = """
schema = 1
[data]
folder = "../data"
[model]
layers = 2
heads = 2
width = 16
context = 256
[train]
steps = 3
batch_sequences = 2
unit_sequences = 2
precision = "fp32"
device = "cpu"
threads = 1
[sample]
tokens = 0
"""


def trained_language_run(folder: Path) -> RunDir:
    """Prepare `folder/data`, and train `folder/run` on it."""
    prepare(["cuentos:80"], out=folder / "data", options=PrepareOptions(vocab=400, val_fraction=0.1))
    run = RunDir(folder / "run")
    run.path.mkdir()
    run.run_file.write_text(RUN_FILE)
    train_run(read_run_file(run.run_file), run)
    return run
