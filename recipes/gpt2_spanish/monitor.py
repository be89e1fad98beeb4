"""How busy this machine is, until Ctrl-C: `cuadrilla monitor`, under the name that the guide gave it."""

import sys

from cuadrilla.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["monitor"]
    main()
