"""The version of this package; modules take it from here, since the package itself imports them."""

__version__ = "0.1.0"
