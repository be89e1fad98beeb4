"""The installed versions a run was made with: stored as `env.json`."""

import importlib.metadata
import platform
from typing import Any

from cuadrilla.host.facts import read_facts
from cuadrilla.version import __version__


def read_environment() -> dict[str, Any]:
    """Python, system, processor and every installed distribution with its version."""
    facts = read_facts()
    heads = [found.metadata for found in importlib.metadata.distributions()]  # read anew with each look at them
    packages = {head["Name"]: head["Version"] for head in heads if head["Name"] and head["Name"] != "cuadrilla"}
    return {
        "cuadrilla": __version__,
        "python": platform.python_version(),
        "system": facts.system_version,
        "machine": facts.machine,
        "cpu": facts.processor,
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
