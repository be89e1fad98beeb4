"""What runs foreign code is refused by `make check`."""

import pytest

import budgets

HERE = "sync/snippet.py"


@pytest.mark.parametrize(
    ("text", "path", "bad"),
    [
        ("from pickle import loads", HERE, True),
        ("import torch as t\nt.load('x')", HERE, True),
        ("import torch.distributed as dist\ndist.all_gather_object([], 1)", HERE, True),
        ("eval('1')", HERE, True),
        ("import yaml\nyaml.load('a')", HERE, True),
        ("import subprocess\nsubprocess.run('ls', shell=True)", HERE, True),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", HERE, True),
        ("model.eval()", HERE, False),
        ("import re\nre.compile('exec(')", HERE, False),
        ("import torch\ntorch.load('x', weights_only=True)", budgets.RESTRICTED_READER, False),
        ("import torch\ntorch.load('x', weights_only=flag)", budgets.RESTRICTED_READER, True),
        ("import torch\ntorch.load('x', weights_only=True)", "train/checkpoint.py", True),
    ],
)
def test_dangerous(text: str, path: str, bad: bool) -> None:
    assert bool(list(budgets.dangerous(budgets.parse(f"src/cuadrilla/{path}", text)))) == bad
