"""The `cuadrilla` command: one file per group of commands, one error boundary.

Data go to stdout, messages to stderr. `--json` turns every table into JSON, `--debug` shows tracebacks. No module here
imports torch at its top: `cuadrilla --help` must answer at once, also on a machine without torch.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command of `sys.argv`."""
    try:
        from cuadrilla.cli.app import main as run
    except KeyboardInterrupt:  # during the import; 130 is INTERRUPTED_EXIT_CODE
        sys.exit(130)
    run()
