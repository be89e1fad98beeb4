"""What runs foreign code is refused by `make check`."""

import pytest

import budgets


def source(text: str, path: str = "src/cuadrilla/sync/snippet.py") -> budgets.Source:
    return budgets.parse(path, text)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("from pickle import loads", True),
        ("import torch as t\nt.load('x')", True),
        ("import torch.distributed as dist\ndist.all_gather_object([], 1)", True),
        ("eval('1')", True),
        ("import yaml\nyaml.load('a')", True),
        ("import subprocess\nsubprocess.run('ls', shell=True)", True),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", True),
        ("model.eval()", False),
        ("import re\nre.compile('exec(')", False),
    ],
)
def test_dangerous(text: str, bad: bool) -> None:
    assert bool(list(budgets.dangerous(source(text)))) == bad


@pytest.mark.parametrize(
    ("call", "path", "bad"),
    [
        ("torch.load('x', weights_only=True)", budgets.RESTRICTED_READER, False),
        ("torch.load('x', weights_only=flag)", budgets.RESTRICTED_READER, True),
        ("torch.load('x', weights_only=True)", "train/checkpoint.py", True),
    ],
)
def test_the_restricted_reader_has_one_place(call: str, path: str, bad: bool) -> None:
    assert bool(list(budgets.dangerous(source(f"import torch\n{call}", f"src/cuadrilla/{path}")))) == bad
