"""A Python file of the user's, loaded as a module: the task of a run, or the function of a search."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from cuadrilla.errors import TaskError

MODULE_PREFIX = "cuadrilla_task_"
"""A user's file is loaded as a module of this name and its own."""


def load_file(path: Path) -> ModuleType:
    """Run the file, which is there. It may import modules that lie beside it.

    Raises TaskError where it cannot be loaded; an error of another kind inside the file comes as it is.
    """
    spec = importlib.util.spec_from_file_location(f"{MODULE_PREFIX}{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file named like an installed package must not replace it
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
    return module
