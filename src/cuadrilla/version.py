"""The version of this package. Modules import it from here, because `cuadrilla/__init__.py` imports them."""

__version__ = "0.1.0"
