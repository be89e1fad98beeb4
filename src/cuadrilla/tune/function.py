"""The function of a search (`tune.function`), as far as the search itself knows it: it is read, and never run here.

Its file and those beside it that it imports are all that a trial needs of the user, here or on another machine. A
search goes on only with the same ones. What the function takes stands in its `def`: seed and budget, if it names them.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuadrilla.config import Scalar, TuneSection
from cuadrilla.errors import ConfigError, TaskError
from cuadrilla.rundir import read_regular

SCORE = "score"
SEED, BUDGET = "seed", "budget"
MAX_FILE_BYTES = 2**20

Code = Mapping[str, bytes]
"""Files of one folder, by name."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """`code`: its file and those that it needs. `required`: what has no default. `open`: takes any name."""

    path: Path
    name: str
    code: Code
    names: frozenset[str]
    required: frozenset[str]
    open: bool

    @property
    def sha256(self) -> str:
        return code_sha256(self.code)

    def request(self, values: Mapping[str, Scalar], *, seed: int, budget: float) -> dict[str, Any]:
        """What a trial's process is to do, as it finds it in its folder. `budget`: part of a whole call."""
        given = {name: value for name, value in ((SEED, seed), (BUDGET, budget)) if name in self.names}
        return {
            "file": str(self.path),
            "files": sorted(self.code),
            "imports": sorted(packages_of(self.code)),
            "function": self.name,
            "sha256": self.sha256,
            "arguments": {**given, **values},
        }


def read_function(section: TuneSection, *, folder: Path) -> Function:
    """The function of a search whose run file is in `folder`. Raises TaskError, and ConfigError where it does not take
    what the section searches."""
    file, _, name = section.function.rpartition(":")
    path = (folder / file).resolve()
    code = read_code(path)
    definition = _definition(_parsed(path, code[path.name]), path=path, name=name)
    arguments = definition.args
    with_default = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    plain = [*arguments.posonlyargs, *arguments.args]
    required = [each.arg for each in plain[:with_default]]
    required += [
        each.arg for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    function = Function(
        path=path,
        name=name,
        code=code,
        names=frozenset(each.arg for each in (*arguments.args, *arguments.kwonlyargs)),
        required=frozenset(required),
        open=arguments.kwarg is not None,
    )
    _check(function, section)
    return function


def _check(function: Function, section: TuneSection) -> None:
    """Raises ConfigError."""
    always = {key for key, dimension in section.space.items() if not dimension.when}
    if section.tokens:
        raise ConfigError(
            "tune.tokens: a function trains on none", hint="limit the search by tune.trials or tune.hours"
        )
    if section.rungs > 1 and (BUDGET not in function.names or BUDGET in section.space):
        raise ConfigError(
            "tune.rungs = {rungs}: {function} has no parameter `budget` that says how long to compute",
            rungs=section.rungs,
            function=section.function,
            hint="give it one, the part of a whole computation (0.25), or leave out tune.rungs",
        )
    if unknown := sorted(section.space.keys() - function.names) if not function.open else []:
        raise ConfigError(
            "tune.space.{key}: {function} has no such argument",
            key=unknown[0],
            function=section.function,
            hint="it takes {names}",
            names=", ".join(sorted(function.names)),
        )
    if missing := sorted(function.required - always - {SEED, BUDGET}):
        raise ConfigError(
            "{function} needs {missing}, which not every trial gives",
            function=section.function,
            missing=", ".join(missing),
            hint="give it a default, or search it in tune.space without `when`",
        )


def read_code(path: Path) -> dict[str, bytes]:
    """A Python file and those beside it that it imports, and so on. Raises TaskError."""
    found: dict[str, bytes] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file.name in found:
            continue
        try:
            found[file.name] = read_regular(file, most_bytes=MAX_FILE_BYTES)
        except OSError as error:
            raise TaskError(
                "cannot read {path}: {reason}",
                path=file,
                reason=error.strerror,
                hint="tune.function is file.py:name, relative to the run file",
            ) from None
        beside = (file.with_name(f"{module}.py") for module in imported(_parsed(file, found[file.name])))
        waiting += [each for each in beside if each.is_file()]
    return dict(sorted(found.items()))


def imported(tree: ast.Module) -> Iterator[str]:
    """The first part of each module that it imports by name, also within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def packages_of(code: Code) -> set[str]:
    """What these files import that is none of them."""
    names = {Path(name).stem for name in code}
    return {module for raw in code.values() for module in imported(ast.parse(raw))} - names


def code_sha256(code: Code) -> str:
    lines = (f"{name} {hashlib.sha256(raw).hexdigest()}\n" for name, raw in sorted(code.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _parsed(path: Path, raw: bytes) -> ast.Module:
    try:
        return ast.parse(raw)
    except (SyntaxError, ValueError) as error:
        raise TaskError("{path} is not Python: {reason}", path=path, reason=error, hint="run it with python") from None


def require_function(path: Path, raw: bytes, *, name: str) -> None:
    """What a file imports or makes in another way is not called, whoever asks for it. Raises TaskError."""
    _definition(_parsed(path, raw), path=path, name=name)


def _definition(tree: ast.Module, *, path: Path, name: str) -> ast.FunctionDef:
    """The last one of that name. Raises TaskError."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise TaskError(
            "{path} has no `def {name}(...)`",
            path=path,
            name=name,
            hint="it defines: {names}",
            names=", ".join(functions) or "-",
        )
    return functions[name]
