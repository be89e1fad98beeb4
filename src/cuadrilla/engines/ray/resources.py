"""What a Ray cluster has: its resources as Ray counts them, and its machines.

A coordinator writes it into its run directory, where `cuadrilla nodes` reads it: nobody else has that cluster's token.
Memory is in bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuadrilla.engines.ray.cluster import NAME_LABEL, RESOURCE


@dataclass(frozen=True, kw_only=True)
class RayMachine:
    """A machine of the cluster. `workers`: how many workers of a training may run there; `resources`: all it has."""

    node: str
    address: str
    workers: int
    resources: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """`resources` is Ray's `cluster_resources`, `available` what of it is free."""

    address: str
    resources: Mapping[str, float]
    available: Mapping[str, float]
    nodes: Sequence[RayMachine]


def read_resources(address: str) -> Resources:
    """Of the cluster that this process is connected to."""
    import ray

    nodes = [machine_of(node) for node in ray.nodes() if node["Alive"]]
    available = ray.available_resources()
    available.pop("object_store_memory", None)  # another one after each step
    return Resources(
        address=address,
        resources=ray.cluster_resources(),
        available=available,
        nodes=sorted(nodes, key=lambda node: (node.node, node.address)),
    )


def machine_of(node: Mapping[str, Any]) -> RayMachine:
    """As `ray.nodes()` describes it."""
    resources: Mapping[str, float] = node["Resources"]
    return RayMachine(
        node=name_of(node),
        address=node["NodeManagerAddress"],
        workers=int(resources.get(RESOURCE, 0)),
        resources=resources,
    )


def name_of(node: Mapping[str, Any]) -> str:
    """The name that `cuadrilla join` gave it, else one of its address."""
    name: str = node.get("Labels", {}).get(NAME_LABEL, "")
    return name or "ray-" + node["NodeManagerAddress"].replace(".", "-")
