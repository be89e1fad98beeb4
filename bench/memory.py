"""Memory of a training, per parameter: each way of training, at two sizes, by the peak of each process.

    python -m bench.memory [--ways adamw muon island sharded crew] [--sizes 4x256 4x512] [--context 64] [--activations]

A process's peak is what the system counted (`ru_maxrss`). Bytes per parameter are the difference of the peaks at the
two sizes over the difference of the parameters: libraries and whatever does not grow with the model cancel out. Passes
are short, so that activations do not count. `--activations`: instead what one forward and backward pass of each size
takes beyond the model, without and with gradient checkpointing, and how long it takes.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import random_data, report
from cuadrilla.config import PRESETS
from cuadrilla.host.torchrun import find_place
from cuadrilla.model.blocks import blocks_of, recompute
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.language import shape_of
from cuadrilla.runfile import resolve

ROOT = Path(__file__).parents[1]
RANKS = 2
NORMALLY = ("adamw", "muon", "island", "sharded", "crew")  # bf16 is emulated, and slow, on many processors
RUN = """
schema = 1
[data]
folder = "data"
[train]
steps = 3
batch_sequences = 2
unit_sequences = 1
precision = "fp32"
threads = 1
device = "cpu"
[checkpoint]
every_seconds = 0
[evaluate]
every_tokens = 1000000000
sequences = 2
[sample]
tokens = 0
"""
WAYS: dict[str, list[str]] = {
    "adamw": ['optim.kind="adamw"'],
    "bf16": ['optim.kind="adamw"', 'train.precision="bf16"'],
    "muon": [],
    "island": ['optim.kind="adamw"'],
    "sharded": ['optim.kind="adamw"', "train.shard=true"],
    "crew": ['optim.kind="adamw"', 'engine.kind="crew"'],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=NORMALLY)
    parser.add_argument("--sizes", nargs="+", default=["4x256", "4x512"], help="LAYERSxWIDTH, or a preset")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=1, help="of a pass")
    parser.add_argument("--activations", action="store_true")
    parser.add_argument("--train-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pass-of", help=argparse.SUPPRESS)
    parser.add_argument("--sets", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pass_of:
        one_pass(arguments.pass_of, arguments)
        return
    if arguments.train_in:
        train(arguments.train_in)
        return
    sizes = [settings(size, arguments) for size in arguments.sizes]
    if arguments.activations:
        report("memory", context=arguments.context, found=[activations(size, arguments) for size in sizes])
    else:
        report("memory", found={way: per_parameter(way, sizes, arguments) for way in arguments.ways})


def settings(size: str, arguments: argparse.Namespace) -> list[str]:
    if size in PRESETS:
        shape = [f'model.preset="{size}"']
    else:
        layers, width = size.split("x")
        shape = [f"model.layers={layers}", f"model.width={width}", "model.heads=8"]
    passes = [f"train.batch_sequences={2 * arguments.sequences}", f"train.unit_sequences={arguments.sequences}"]
    passes += [f"train.pass_sequences={arguments.sequences}"]
    return [*shape, *passes, f"model.context={arguments.context}"]


def per_parameter(way: str, sizes: list[list[str]], arguments: argparse.Namespace) -> dict[str, Any]:
    """For each kind of process."""
    small, large = (peaks(way, [*WAYS[way], *size], arguments) for size in sizes)
    grown = large["parameters"] - small["parameters"]
    roles = [role for role in small if role != "parameters"]
    found = {role: round((large[role] - small[role]) / grown, 1) for role in roles}
    return {"bytes_per_parameter": found, "small": small, "large": large}


def activations(size: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Each in a process of its own: a peak never falls."""
    found: dict[str, Any] = {"size": size[0]}
    for told in ("plain", "gradient_checkpointing"):
        flags = ["--vocabulary", str(arguments.vocabulary), "--sequences", str(arguments.sequences)]
        command = [sys.executable, "-m", "bench.memory", "--pass-of", told, *flags, "--sets", json.dumps(size)]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        found[told] = json.loads(done.stdout)
    return found


def one_pass(told: str, arguments: argparse.Namespace) -> None:
    """Bytes beyond weights and gradients, and seconds."""
    section = resolve(RUN, sets=json.loads(arguments.sets)).config.model
    model = GPT2(shape_of(section, tokens=arguments.vocabulary))
    if told != "plain":
        recompute(blocks_of(model))
    ids = torch.randint(arguments.vocabulary, (arguments.sequences, section.shape[-1]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter).add_(1)  # touched, so that it is there
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    model.loss(ids, ids).backward()
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"bytes": (after - before) * 1024, "seconds": round(seconds, 2)}))


def peaks(way: str, sets: list[str], arguments: argparse.Namespace) -> dict[str, int]:
    """Parameters, and the bytes of each kind of process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_data(folder / "data", vocab_size=arguments.vocabulary, num_tokens=40 * arguments.context)
        (folder / "run.toml").write_text(RUN)
        (folder / "sets.json").write_text(json.dumps(sets))
        start = [sys.executable]
        if way in ("island", "sharded"):
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*start, "-m", "bench.memory", "--train-in", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, int] = {}
        for path in sorted(folder.glob("peak-*.json")):
            found |= json.loads(path.read_text())
        return found


def train(folder: Path) -> None:
    """One process's part: train, then leave word of its peak."""
    from cuadrilla.engines.run import Audience, train_run
    from cuadrilla.rundir import RunDir

    place, run = find_place(), RunDir(folder)
    resolved = resolve((folder / "run.toml").read_text(), sets=json.loads((folder / "sets.json").read_text()))
    counted: list[int] = []

    def count(context: Any) -> list[Any]:
        counted.append(sum(parameter.numel() for parameter in context.model.parameters()))
        return []

    train_run(resolved, run, audience=Audience(sinks=count))
    rank = place.rank if place else 0
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"parameters": counted[0]} if counted else {}
    if resolved.config.engine.kind == "crew":
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        found |= {"coordinator": own, "worker": children}
    else:
        found |= {f"rank {rank}" if place else "process": own}
    (folder / f"peak-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
