"""cuadrilla: one PyTorch model, trained on all the machines you already own.

The names of the Python API (`api.py`) can be imported from here. Each is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cuadrilla.version import __version__ as __version__

if TYPE_CHECKING:
    from cuadrilla.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in (api := import_module("cuadrilla.api")).__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *import_module("cuadrilla.api").__all__]
