"""`python -m cuadrilla` is the `cuadrilla` command."""

from cuadrilla.cli import main

if __name__ == "__main__":
    main()
