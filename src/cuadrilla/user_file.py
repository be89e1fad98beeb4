"""Loads a user's Python file, the task of a run, as a module."""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from cuadrilla.errors import CuadrillaError, TaskError

MODULE_PREFIX = "cuadrilla_task_"
"""Names of users' modules begin with this and end with a hash of the path: one process may load files of two runs."""


class UsersCode:
    """A block that runs a user's code. An error in it, `sys.exit` included, becomes a TaskError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, CuadrillaError):
            raise as_task_error(error) from error


def as_task_error(error: BaseException) -> TaskError:
    """An error of a user's code, with its place if that is known."""
    kind, hint = type(error).__name__, "correct it, or what the run file gives it; --debug shows the traceback"
    if place := place_of(error):
        return TaskError("{place}: {kind}: {reason}", place=place, kind=kind, reason=error, hint=hint)
    return TaskError("its code ends with {kind}: {reason}", kind=kind, reason=error, hint=hint)


def place_of(error: BaseException) -> str:
    """`file.py:12 in loss`: where in a loaded file, or beside one, the error arose; else an empty text."""
    folders = {file.parent for file in _beside}
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).parent in folders]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


_beside: dict[Path, set[Path]] = {}
"""By loaded file: the files in its folder that it has imported."""


def load_file(path: Path) -> ModuleType:
    """Load an existing file. It may import modules of its folder, which comes last in `sys.path`: a file named like an
    installed package does not replace the package. Modules of folders of files loaded earlier are forgotten.

    Raises TaskError if the file cannot be loaded. Errors of other kinds in the file are passed on.
    """
    path = path.resolve()
    _forget({file.parent for file in _beside} - {path.parent})
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    mark = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{MODULE_PREFIX}{path.stem}_{mark}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _beside.setdefault(path, set())  # before the file runs, for the place of an error in it
    sys.modules[spec.name] = module  # dataclasses and pickling of the user's own classes look here
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError) as error:
        raise TaskError(
            "{path} cannot be loaded: {kind}: {reason}",
            path=path,
            kind=type(error).__name__,
            reason=error,
            hint="run it with python",
        ) from error
    _beside[path].update(file for _, file in _modules_in({path.parent}))
    return module


def files_of(path: Path) -> list[Path]:
    """A loaded file, and the files in its folder that it has imported."""
    beside = _beside.get(path.resolve(), set()) | {file for _, file in _modules_in({path.parent})}
    return [path, *sorted(file for file in beside if file.name != path.name)]


def _forget(folders: set[Path]) -> None:
    """Remove the modules of these folders from `sys.modules`, and the folders from `sys.path`."""
    for name, _ in _modules_in(folders):
        if name != "__main__" and not name.startswith(MODULE_PREFIX):
            del sys.modules[name]
    sys.path[:] = [each for each in sys.path if Path(each) not in folders]


def _modules_in(folders: set[Path]) -> list[tuple[str, Path]]:
    named = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    return [(name, Path(file)) for name, file in named if file and Path(file).parent in folders]
