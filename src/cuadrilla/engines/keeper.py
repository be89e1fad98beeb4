"""A process that ends what `launch` has started if `launch` itself is killed. Needs nothing but Python.

It is the leader of the process group of all ranks, so that no rank can be started that it does not reach. Its standard
input is a pipe of which `launch` holds the only other end: when that closes, the whole group ends, the keeper as well.
On its standard output it says one byte when it is ready; whoever reads the end there knows that it is gone.

`python -I -S keeper.py SECONDS`: between asking (SIGTERM) and killing.
"""

import os
import signal
import sys
import time


def main(grace_seconds: float) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # what is for the ranks reaches it, too
    os.write(1, b"\n")
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(grace_seconds)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]))
