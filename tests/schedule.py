"""Which tests run one after another in the same process when pytest-xdist runs several processes.

Groups start in the order of collection, so the short groups of tests/unit come last and let all processes end together.
(The marker `xdist_group` of xdist 3.8 has no effect with pytest 9.2, which stores the ids of tests elsewhere.)
"""

from xdist.scheduler import LoadScopeScheduling

RAY, RIG, DOCKER = "ray", "rig", "docker"
SHARE = (
    "tests/spawn/test_dask.py",
    "tests/spawn/test_faults.py",
    "tests/spawn/test_island.py",
    "tests/spawn/test_serve.py",
    "tests/spawn/test_serve_hostile.py",
    "tests/spawn/test_tune.py",
)
"""Files whose tests share something that takes long to make: a cluster, a service, a trained run."""


class Groups(LoadScopeScheduling):
    """Gives a group of tests to a process that has little left to do."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The group of a test. All tests of Ray, all of tests/rig and all of tests/docker are one group each: they keep
    both cores of a small machine busy, and the image is built once. A file is a group if its tests are short or share
    something. Every other test is a group of its own."""
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
    """Whether `ray` is a word of the file's name."""
    return "ray" in nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py").split("_")
