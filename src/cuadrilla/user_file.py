"""A Python file of the user's, loaded as a module: the task of a run."""

import hashlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

from cuadrilla.errors import CuadrillaError, TaskError

MODULE_PREFIX = "cuadrilla_task_"
"""A user's file is loaded as a module of this name, its own and its folder's: two runs may be here at once."""


class UsersCode:
    """A block in which code of a user's runs: whatever ends it, `sys.exit` too, is a TaskError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, CuadrillaError):
            told = "its code ends with {kind}: {reason}"
            raise TaskError(told, kind=type(error).__name__, reason=error, hint="run it with python") from error


_loading = threading.Lock()
_folders: set[str] = set()
"""Of the files that were loaded."""
_imported: dict[Path, set[Path]] = {}
"""What each has found beside it."""


def load_file(path: Path) -> ModuleType:
    """Run the file, which is there. It may import modules that lie beside it; those of the same name that lie beside
    another file, which was loaded before, are none of its.

    Raises TaskError where it cannot be loaded; an error of another kind inside the file comes as it is.
    """
    with _loading:
        return _load(path)


def _load(path: Path) -> ModuleType:
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{MODULE_PREFIX}{path.stem}_{mark}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _look_beside(path.parent)
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
    _imported.setdefault(path.resolve(), set()).update(_modules_in(path.parent))
    return module


def files_of(path: Path) -> list[Path]:
    """A file that was loaded, and those beside it that it has imported."""
    beside = _imported.get(path.resolve(), set()) | _modules_in(path.parent)
    return [path, *sorted(file for file in beside if file.name != path.name)]


def _modules_in(folder: Path) -> set[Path]:
    files = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    return {file for file in files if file.parent == folder}


def _look_beside(folder: Path) -> None:
    """Import from this folder, last: a file named like an installed package must not replace it.

    Modules beside another user's file are forgotten, but for those whose folder Python had been told of already.
    """
    others = _folders - {str(folder)}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        own = name == "__main__" or name.startswith(MODULE_PREFIX)
        if file and not own and str(Path(file).parent) in others:
            del sys.modules[name]
    last = [str(folder)] if str(folder) in _folders or str(folder) not in sys.path else []
    behind = [other for other in sys.path if other in others]
    _folders.update(last)
    sys.path[:] = [each for each in sys.path if each not in _folders] + last + behind
