"""Each limit on a snippet that passes it by one and one that does not."""

from pathlib import Path
from textwrap import dedent

import pytest

import budgets

pytestmark = pytest.mark.unit


def source(text: str, path: str = "src/cuadrilla/sync/snippet.py") -> budgets.Source:
    return budgets.parse(path, dedent(text))


def function_of(lines: int, name: str = "f") -> str:
    """A function of so many lines, at least two."""
    return "\n".join([f"def {name}() -> None:", *["    pass"] * (lines - 1)]) + "\n"


def violations(lines: list[budgets.Line]) -> list[str]:
    return [text for line in lines for text in line.violations]


def test_function_length():
    assert violations(budgets.check_functions([source(function_of(80) + function_of(2) * 20)])) == []
    over = violations(budgets.check_functions([source(function_of(81) + function_of(2) * 20)]))
    assert over == ["src/cuadrilla/sync/snippet.py:1 f has 81 lines"]


def test_only_the_loop_may_be_longer():
    def over(path: str, name: str, lines: int) -> list[str]:
        return violations(budgets.check_functions([source(function_of(lines, name) + function_of(2) * 20, path)]))

    assert over("src/cuadrilla/train/loop.py", "train", 150) == []
    assert len(over("src/cuadrilla/train/loop.py", "train", 151)) == 1
    assert len(over("src/cuadrilla/train/loop.py", "other", 81)) == 1
    assert len(over("src/cuadrilla/train/probe.py", "train", 81)) == 1


def test_nine_of_ten_functions_are_short():
    assert violations(budgets.check_functions([source(function_of(26) + function_of(25) * 9)])) == []
    over = violations(budgets.check_functions([source(function_of(26) * 2 + function_of(25) * 8)]))
    assert over == ["nine of ten functions have up to 26 lines"]


def test_file_length():
    assert violations(budgets.check_files([source("pass\n" * 600)])) == []
    assert violations(budgets.check_files([source("pass\n" * 601)])) == ["src/cuadrilla/sync/snippet.py has 601 lines"]


@pytest.mark.parametrize(
    ("signature", "missing"),
    [
        ("def f(a: int, *, b: str = '') -> None: ...", []),
        ("def f(self) -> None: ...", []),
        ("def f(a) -> None: ...", ["a"]),
        ("def f(a: int): ...", ["return"]),
        ("async def f(*args, **kwargs) -> None: ...", ["args", "kwargs"]),
        ("def f(a: int, /, b, *, c) -> None: ...", ["b", "c"]),
    ],
)
def test_annotations(signature, missing):
    (line,) = budgets.check_annotations([source(signature)])
    assert line.violations == ((f"src/cuadrilla/sync/snippet.py:1 f: {', '.join(missing)}",) if missing else ())


@pytest.mark.parametrize(
    ("handler", "broad"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept (ValueError, BaseException) as e: pass", True),
        ("try: f()\nexcept: pass", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("try: f()\nexcept BaseException:\n    undo()\n    raise", False),
        ("try: f()\nexcept ValueError: pass", False),
        ("with contextlib.suppress(OSError): f()", False),
    ],
)
def test_broad_excepts(handler, broad):
    assert violations(budgets.check_excepts([source(f"{handler}\n" * 3)])) == []
    assert len(violations(budgets.check_excepts([source(f"{handler}\n" * 4)]))) == (4 if broad else 0)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "from torch import load as read\nread('x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "eval('1')",
        "exec('1')",
        "import yaml\nyaml.load('a')",
        "import os\nos.system('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_dangerous(text):
    assert list(budgets.dangerous(source(text)))


@pytest.mark.parametrize(
    ("call", "path", "bad"),
    [
        ("torch.load('x', weights_only=True)", budgets.RESTRICTED_READER, False),
        ("torch.load('x', weights_only=False)", budgets.RESTRICTED_READER, True),
        ("torch.load('x', weights_only=flag)", budgets.RESTRICTED_READER, True),
        ("torch.load('x')", budgets.RESTRICTED_READER, True),
        ("torch.load('x', weights_only=True)", "train/checkpoint.py", True),
        ("torch.save(1, 'x')", budgets.RESTRICTED_READER, True),
    ],
)
def test_the_restricted_reader_has_one_place(call, path, bad):
    found = list(budgets.dangerous(source(f"import torch\n{call}", f"src/cuadrilla/{path}")))
    assert bool(found) == bad


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "# eval(x) and pickle.load(x)",
        '"""Never torch.load."""',
        "import torch\nmodel.load_state_dict(torch.zeros(1))",
        "import json\njson.load(file)",
        "run('ls', shell=False)",
        "import re\nre.compile('exec(')",
    ],
)
def test_harmless(text):
    assert list(budgets.dangerous(source(text))) == []


@pytest.mark.parametrize(
    ("text", "path", "bad"),
    [
        ("print(1)", "sync/a.py", True),
        ("print(1)", "cli/a.py", False),
        ("console.print(1)", "sync/a.py", False),
        ("import torch", "host/a.py", True),
        ("def f() -> None:\n    from torch import nn", "config.py", True),
        ("import torch", "sync/a.py", False),
        ("import ray", "engines/local.py", True),
        ("import ray", "engines/ray/server.py", False),
        ("from grpc import aio", "link/grpc_server.py", False),
        ("from grpc import aio", "link/inproc.py", True),
        ("bind('0.0.0.0')", "serve/app.py", True),
        ("bind('0.0.0.0:80')", "serve/app.py", True),
        ("bind('http://[::]:80/')", "serve/app.py", True),
        ("bind('::')", "serve/app.py", True),
        ("bind('127.0.0.1')", "serve/app.py", False),
        ("say('never listen on 0.0.0.0 without a password')", "serve/app.py", False),
    ],
)
def test_misplaced(text, path, bad):
    assert bool(list(budgets.misplaced(source(text, f"src/cuadrilla/{path}")))) == bad


def test_cycles():
    a = source("from cuadrilla.link import b", "src/cuadrilla/link/a.py")
    b = source("def f() -> None:\n    import cuadrilla.link.a", "src/cuadrilla/link/b.py")
    c = source("from cuadrilla.link.a import name", "src/cuadrilla/link/c.py")
    assert budgets.find_cycle([a, c, source("", "src/cuadrilla/link/b.py")]) == []
    assert set(budgets.find_cycle([a, b, c])) == {"cuadrilla.link.a", "cuadrilla.link.b"}


def test_class_names():
    a, b = source("class Part: ...\nclass _Own: ...", "a.py"), source("class Other: ...\nclass _Own: ...", "b.py")
    assert violations(budgets.check_names([a, b])) == []
    assert violations(budgets.check_names([a, b, source("class Part: ...", "c.py")])) == ["Part: a.py, c.py"]


def test_version_and_changelog():
    changelog = "# Changelog\n## [Unreleased]\n## [0.2.0] - unreleased\n## [0.1.0] - 2026-01-01\n"
    assert violations(budgets.check_version('__version__ = "0.2.0"\n', changelog)) == []
    assert len(violations(budgets.check_version('__version__ = "0.1.0"\n', changelog))) == 1
    assert len(violations(budgets.check_version("", ""))) == 1


def test_a_checkout_that_breaks_a_limit_fails(tmp_path: Path):
    package = tmp_path / "src" / "cuadrilla"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1.0.0"\n')
    (package / "bad.py").write_text("import pickle\n")
    sources = budgets.read_sources(tmp_path, ["src", "missing"])
    written: list[str] = []
    assert budgets.show(budgets.check_forbidden(sources), written.append) == 1
    assert "src/cuadrilla/bad.py:1 imports pickle" in "".join(written)
    assert budgets.show(budgets.check_files(sources), written.append) == 0
