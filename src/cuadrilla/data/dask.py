"""The workers of a Dask cluster, for `data prepare --dask scheduler:8786`.

They need none of this machine's files: a job carries the bytes that it reads, and returns the bytes of its result. It
depends on nothing else, so Dask may repeat it elsewhere if a worker dies. Dask's own configuration says how to reach
the scheduler (TLS: https://distributed.dask.org/en/stable/tls.html).
"""

from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from unicodedata import unidata_version

import distributed
import tokenizers
from distributed.scheduler import KilledWorker

from cuadrilla.data.corpus import RECIPE
from cuadrilla.data.executor import Workers
from cuadrilla.errors import EnvironmentProblem, LinkError
from cuadrilla.log import to_files_only
from cuadrilla.printable import one_line
from cuadrilla.version import __version__


def program() -> str:
    """All versions that decide the bytes of a job's result. They must be equal on all workers."""
    return f"cuadrilla {__version__}.{RECIPE}, tokenizers {tokenizers.__version__}, Unicode {unidata_version}"


@contextmanager
def dask_workers(scheduler: str) -> Iterator[Workers]:
    """The workers of a cluster. Raises LinkError without scheduler or workers, or if a job kills workers."""
    to_files_only("distributed")
    try:
        with distributed.Client(scheduler, set_as_default=False, name="cuadrilla") as client:
            found = set(client.run(program).values())
            if not found:
                raise OSError("it has no workers")
            if others := found - {program()}:
                raise EnvironmentProblem(
                    "a Dask worker has {theirs}; this machine has {wanted}",
                    theirs=min(others),
                    wanted=program(),
                    hint="install the same versions on all machines and restart the workers",
                )
            yield Workers(executor=client.get_executor(pure=False), ahead=2 * sum(client.nthreads().values()))
    except (KilledWorker, CancelledError, OSError) as error:
        raise LinkError(
            "the Dask cluster {scheduler} cannot be used: {reason}",
            scheduler=scheduler,
            reason=one_line(str(error) or type(error).__name__),
            hint="start it and its workers (docs/other-tools.md), then run the same command again",
        ) from None
