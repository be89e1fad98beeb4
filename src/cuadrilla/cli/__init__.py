"""The `cuadrilla` command: one file per group of verbs, one error boundary.

Data goes to stdout, talk to stderr; `--json` turns every table into JSON; `--debug` shows tracebacks. Nothing here
imports torch at the top: `cuadrilla --help` must answer at once on a machine without it.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command of `sys.argv`."""
    try:
        from cuadrilla.cli.app import main as run
    except KeyboardInterrupt:  # nothing has begun; INTERRUPTED_EXIT_CODE
        sys.exit(130)
    run()
