"""Checks of a Mac: its Python and its system suit its GPU. (Whether the GPU computes is a check of devices.)

Sources: PyTorch's release notes: MPS needs macOS 14, and there are no builds for Intel Macs after 2.2.
"""

from collections.abc import Iterator

from cuadrilla.doctor.diagnosis import Diagnosis, fail
from cuadrilla.doctor.here import Here
from cuadrilla.messages import Message

OLDEST_MACOS = 14


def python(here: Here) -> Iterator[Diagnosis]:
    """Built for the chip."""
    if here.host.rosetta:
        yield fail(
            Message("this Python is an Intel build, translated by Rosetta: it has no GPU"),
            command="arch -arm64 /bin/zsh -c 'brew install python@3.14 && make setup PYTHON=python3.14'",
        )
    elif here.host.system == "Darwin" and here.host.machine == "x86_64":
        yield fail(
            Message("PyTorch has no new versions for Intel Macs"),
            remedy=Message("this machine cannot train; another one can"),
        )


def system(here: Here) -> Iterator[Diagnosis]:
    """New enough for MPS."""
    major = (here.host.system_version or "").partition(".")[0]
    if here.host.system == "Darwin" and major.isdigit() and int(major) < OLDEST_MACOS:
        yield fail(
            Message(
                "macOS {version}: PyTorch uses the GPU from macOS {needed} on",
                version=here.host.system_version,
                needed=OLDEST_MACOS,
            ),
            command="softwareupdate --install --all",
        )
