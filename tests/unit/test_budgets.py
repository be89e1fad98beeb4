"""What `make check` refuses: each limit on a snippet that passes it by one, and on one that does not."""

import pytest

import budgets

pytestmark = pytest.mark.unit


def source(text: str, path: str = "src/cuadrilla/sync/snippet.py") -> budgets.Source:
    return budgets.parse(path, text)


def functions(*lines: int, name: str = "f") -> str:
    """Functions of so many lines."""
    return "".join(f"def {name}() -> None:\n" + "    pass\n" * (count - 1) for count in lines)


def violations(lines: list[budgets.Line]) -> list[str]:
    return [text for line in lines for text in line.violations]


@pytest.mark.parametrize(
    ("text", "path", "bad"),
    [
        (functions(80, *[2] * 20), "sync/a.py", False),
        (functions(81, *[2] * 20), "sync/a.py", True),
        (functions(151, *[2] * 20, name="train"), "train/loop.py", True),
        (functions(26, *[25] * 9), "sync/a.py", False),
        (functions(26, 26, *[25] * 8), "sync/a.py", True),
    ],
)
def test_functions(text: str, path: str, bad: bool) -> None:
    assert bool(violations(budgets.check_functions([source(text, f"src/cuadrilla/{path}")]))) == bad


@pytest.mark.parametrize(
    ("signature", "bad"),
    [("def f(a: int, *, b: str = '') -> None: ...", False), ("def f(self) -> None: ...", False),
     ("def f(a) -> None: ...", True), ("async def f(*args: int, **kwargs) -> None: ...", True),
     ("def f(a: int): ...", True)],
)  # fmt: skip
def test_annotations(signature: str, bad: bool) -> None:
    assert bool(violations(budgets.check_annotations([source(signature)]))) == bad


@pytest.mark.parametrize(
    ("handler", "broad"),
    [
        ("try: f()\nexcept (ValueError, BaseException) as e: pass", True),
        ("try: f()\nexcept: pass", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("try: f()\nexcept BaseException:\n    undo()\n    raise", False),
    ],
)
def test_broad_excepts(handler: str, broad: bool) -> None:
    assert violations(budgets.check_excepts([source(f"{handler}\n" * 3)])) == []
    assert bool(violations(budgets.check_excepts([source(f"{handler}\n" * 4)]))) == broad


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


@pytest.mark.parametrize(
    ("text", "path", "bad"),
    [
        ("print(1)", "sync/a.py", True),
        ("print(1)", "cli/a.py", False),
        ("def f() -> None:\n    from torch import nn", "config.py", True),
        ("from grpc import aio", "link/inproc.py", True),
        ("bind('0.0.0.0:80')", "serve/app.py", True),
        ("say('never listen on 0.0.0.0 without a password')", "serve/app.py", False),
    ],
)
def test_misplaced(text: str, path: str, bad: bool) -> None:
    assert bool(list(budgets.misplaced(source(text, f"src/cuadrilla/{path}")))) == bad


def test_cycles_and_names() -> None:
    a = source("from cuadrilla.link import b\nclass Part: ...", "src/cuadrilla/link/a.py")
    b = source("def f() -> None:\n    import cuadrilla.link.a\nclass Part: ...", "src/cuadrilla/link/b.py")
    assert set(budgets.find_cycle([a, b])) == {"cuadrilla.link.a", "cuadrilla.link.b"}
    assert budgets.find_cycle([a, source("", "src/cuadrilla/link/b.py")]) == []
    assert violations(budgets.check_names([a, b])) == ["Part: src/cuadrilla/link/a.py, src/cuadrilla/link/b.py"]


def test_a_package_does_not_grow() -> None:
    sizes = budgets.read_sizes("# what allowed target\nsrc/link 100 50\ntests 30 20\n")
    assert violations(budgets.check_sizes(sizes, {"src/link": 100, "tests": 20})) == []
    assert violations(budgets.check_sizes(sizes, {"src/link": 101, "tests": 20})) == ["has 101, may have 100"]
    lowered = budgets.read_sizes(budgets.write_sizes(sizes, {"src/link": 80, "tests": 40}))
    assert lowered == [budgets.Size("src/link", 80, 50), budgets.Size("tests", 30, 20)]
