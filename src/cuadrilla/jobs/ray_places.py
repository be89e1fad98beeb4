"""Where jobs are done by the machines of a Ray cluster: each of their devices that is offered is a place.

What a machine is given, what comes back, and what is verified of it, is as in a crew (`crew.py`). An actor that dies or
is silent is no failure of its job, and Ray starts it again; a machine that comes later gets a place. Nothing is done on
this machine unless it is one of the cluster and offers itself, too.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.engines.ray.cluster import OFFER, joined
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.jobs.crew import CrewPlaces
from cuadrilla.jobs.places import J, Left
from cuadrilla.link.grpc_ray import admits
from cuadrilla.log import libraries_apart
from cuadrilla.rundir import make_private

if TYPE_CHECKING:
    from cuadrilla.engines.ray.jobs import RayJobServer

LOOK_SECONDS = 2.0
WAIT_SECONDS = 0.1
GONE_SECONDS = 10.0
"""A head that does not answer for so long has ended."""
ALONE_SECONDS = 180.0
"""So long may nobody be there: an actor loads torch before it joins, and its machine may be busy."""


class RayPlaces(CrewPlaces[J]):
    """The machines of the cluster at `address`, for as long as `server` runs. Used by one thread."""

    def __init__(self, *, folder: Path, address: str) -> None:
        super().__init__(home=Home(folder), folder=folder)  # of no crew: nobody is invited, paused or kicked
        self._address = address
        self._ray: RayJobServer | None = None
        self._looked_at = -LOOK_SECONDS
        self._answered_at = self._alone_since = time.monotonic()
        self._is_useful = False

    def open(self, server: "RayJobServer") -> None:
        """Returns when somebody has come. Raises LinkError if nobody does."""
        self._ray = server
        self.server = server
        while not self.places:
            self.look()
            if not server.has_places():
                raise LinkError(
                    "no machine of the Ray cluster at {address} offers itself",
                    address=self._address,
                    hint="on each that is to work: ray start ... {offer}",
                    offer=OFFER,
                )
            time.sleep(WAIT_SECONDS)

    def look(self) -> list[Left[J]]:
        """Who has ended since. Raises LinkError where nobody is there any more, ResourceError."""
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._look_around()
        left = super().look()
        self._is_useful |= any(each.complete for each in left)
        if left or self.places or self.busy:
            self._alone_since = time.monotonic()
        else:
            self._require_hope()
        return left

    def _look_around(self) -> None:
        """Who is there. A head that has gone is asked nothing: Ray would wait for it, and then end this process without
        a word. Raises LinkError."""
        assert self._ray is not None
        try:
            admits(self._address, token="")
        except LinkError:
            if time.monotonic() - self._answered_at < GONE_SECONDS:
                return
            self._ray.abandon()
            raise LinkError(
                "the Ray cluster at {address} has gone",
                address=self._address,
                hint="start it again, then type the same command: what has come back is kept",
            ) from None
        self._answered_at = time.monotonic()
        self._ray.place_on_new_nodes(own="")

    def _require_hope(self) -> None:
        """Who has done a job is tried again after a while, also if its worker has ended. Raises LinkError."""
        assert self._ray is not None
        refusal = self._ray.refusal()
        if refusal is not None and not self._is_useful:
            raise LinkError(
                "no machine of the Ray cluster at {address} can do this: {reason}",
                address=self._address,
                reason=refusal.message,
                hint=refusal.hint,
            )
        if time.monotonic() - self._alone_since > ALONE_SECONDS:
            raise LinkError(
                "nobody has come from the Ray cluster at {address} for {seconds:.0f} s",
                address=self._address,
                seconds=ALONE_SECONDS,
                hint="are its machines there, and not busy with another run? ray status says it",
            )


@contextmanager
def open_ray_places(address: str, *, folder: Path, without_token: bool = False) -> "Iterator[RayPlaces[Any]]":
    """The places of a running cluster; their actors end behind the block. `folder`: what happens there is written down.

    `address` and `without_token`: as of `joined`. Raises EnvironmentProblem, LinkError.
    """
    logs = folder / "logs"
    make_private(folder)
    make_private(logs)
    with libraries_apart(logs / "ray.txt"), joined(address, without_token=without_token) as cluster:
        from cuadrilla.engines.ray.jobs import RayJobServer
        from cuadrilla.jobs.ray_node import do_ray_jobs

        places: RayPlaces[Any] = RayPlaces(folder=folder, address=cluster.address)
        try:
            places.open(RayJobServer(receiver=places, do=do_ray_jobs))
            yield places
        finally:
            places.close()
