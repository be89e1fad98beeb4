"""The `cuadrilla` command: one file per group of verbs, one error boundary.

Data goes to stdout, talk to stderr; `--json` turns every table into JSON; `--debug` shows tracebacks. Nothing here
imports torch at the top: `cuadrilla --help` must answer at once on a machine without it.
"""

from cuadrilla.cli.app import main

__all__ = ["main"]
