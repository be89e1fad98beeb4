"""The installed versions a run was made with: stored as `env.json`, compared by `cuadrilla env diff`."""

import importlib.metadata
import platform
from collections.abc import Mapping
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
        "cpu": facts.cpu.name,
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def compare_environments(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows name, old, new for everything that differs; "-" where it is absent."""
    a, b = _flat(old), _flat(new)
    return [
        {"name": name, "old": a.get(name, "-"), "new": b.get(name, "-")}
        for name in sorted(a.keys() | b.keys(), key=str.lower)
        if a.get(name) != b.get(name)
    ]


def _flat(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = environment.get("packages", {})
    top = {key: str(value) for key, value in environment.items() if key not in ("packages", "schema")}
    return top | {name: str(version) for name, version in packages.items()}
