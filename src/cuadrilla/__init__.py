"""cuadrilla: one PyTorch model, trained on all the machines you already own.

The names of the Python API (`api.py`) can be imported from here. Each is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cuadrilla.version import __version__ as __version__

if TYPE_CHECKING:
    from cuadrilla.api import CuadrillaError as CuadrillaError
    from cuadrilla.api import LanguageModel as LanguageModel
    from cuadrilla.api import Outcome as Outcome
    from cuadrilla.api import Prepared as Prepared
    from cuadrilla.api import PrepareOptions as PrepareOptions
    from cuadrilla.api import Run as Run
    from cuadrilla.api import Sampling as Sampling
    from cuadrilla.api import Trained as Trained
    from cuadrilla.api import load_model as load_model
    from cuadrilla.api import new_run as new_run
    from cuadrilla.api import open_run as open_run
    from cuadrilla.api import prepare as prepare

_API = ("CuadrillaError", "LanguageModel", "Outcome", "PrepareOptions", "Prepared", "Run", "Sampling", "Trained",
        "load_model", "new_run", "open_run", "prepare")  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("cuadrilla.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *_API]
