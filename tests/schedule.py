"""Which tests follow one another in one process when pytest-xdist runs several.

Groups are begun in the order of the collection, so the short ones of tests/unit come last and even out the end. (The
groups by marker of xdist 3.8 do nothing with pytest 9.2, which keeps the ids of tests elsewhere.)
"""

from xdist.scheduler import LoadScopeScheduling

RAY, RIG, DOCKER = "ray", "rig", "docker"
SHARE = (
    "tests/spawn/test_dask.py",
    "tests/spawn/test_island.py",
    "tests/spawn/test_serve.py",
    "tests/spawn/test_serve_hostile.py",
    "tests/spawn/test_tune.py",
)
"""Files whose tests share what takes long to make: a cluster, a service, a trained run."""


class Groups(LoadScopeScheduling):
    """A process takes a group when it has little left to do."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Ray's tests, the networks' and the containers': one of each at a time, since they keep both cores of a small
    machine busy, and an image is built once. A file whose tests are short, or share something. Everything else by
    itself."""
    file = nodeid.partition("::")[0]
    folder = file.split("/")[1]
    if folder == DOCKER:
        return DOCKER
    if uses_ray(nodeid):
        return RAY
    if folder == RIG:
        return RIG
    return file if folder in ("unit", "inproc", "browser") or file in SHARE else nodeid


def uses_ray(nodeid: str) -> bool:
    """Of a file about Ray."""
    return "ray" in nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py").split("_")
