"""What an actor of a Ray cluster does that is given jobs: what a machine of a crew does (`node.py`), over Ray."""

import logging
import threading

from cuadrilla.engines.bundle import fetch
from cuadrilla.engines.ray.jobs import RayJobConnection
from cuadrilla.engines.ray.worker import RayPlace, courtesy_here
from cuadrilla.engines.reporting import lines_kept
from cuadrilla.engines.worker import WorkerOptions
from cuadrilla.home import Home
from cuadrilla.jobs.node import JobWorker
from cuadrilla.log import TALK, set_up_logging
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import make_private, private_folder

log = logging.getLogger(__name__)


def do_ray_jobs(place: RayPlace, connection: RayJobConnection) -> str:
    """Until there are no more; why it ended. The folder of its jobs goes with it.

    Raises LinkError where this machine is refused or has another version, ConfigError, ResourceError.
    """
    set_up_logging(None, worker=place.name)
    jobs = Home.of_user().jobs
    make_private(jobs)
    with private_folder(where=jobs) as folder, lines_kept() as lines:
        courtesy = courtesy_here()
        worker = JobWorker(
            options=WorkerOptions(
                address="",
                connect=lambda _address: connection,
                prepare=lambda way, said: fetch(way, said, home=Home.of_user(), report=_report),
            ),
            use=Use(name="", device=place.device, threads=place.threads),
            connect=lambda _address: connection,
            courtesy=courtesy,
            report=_report,
            folder=folder,
            data=None,
            fetching=threading.Lock(),
            leaving=threading.Event(),
        )
        try:
            return worker.work(lines)
        finally:
            courtesy.close()


def _report(text: str) -> None:
    log.info("%s", text, extra=TALK)
