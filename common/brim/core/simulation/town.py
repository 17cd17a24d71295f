"""What is simulated: worker servers and jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from brim.core.model import Demand, Device, Node
from brim.core.placement.cluster import Cluster
from brim.core.placement.fit import capacity_mib

ENDLESS_EXECUTORS = 1_000_000
"""Executors of a device where memory alone is to bound how many tasks share it."""

TASK = "task"
"""The name of every simulated task."""


@dataclass(frozen=True, slots=True)
class Server:
    """A worker server to simulate."""

    node: Node
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A task to simulate; times in seconds."""

    demand: Demand
    arrival_s: float = 0.0
    run_s: float = 0.0

    @property
    def size_mib(self) -> int:
        """Memory of all its GPUs."""
        return self.demand.gpus * self.demand.vram_mib


def capacity_of(servers: Iterable[Server]) -> int:
    """Memory of all devices in MiB."""
    return sum(capacity_mib(device) for server in servers for device in server.devices)


def cluster_of(servers: Sequence[Server]) -> Cluster:
    """An empty cluster of these servers, whose fixed order is theirs; every worker runs every task."""
    cluster = Cluster({"": frozenset({TASK})})
    for number, server in enumerate(servers):
        name = f"{number}-{server.node.name}"
        cluster.update_node(replace(server.node, name=name))
        for device in server.devices:
            cluster.update(replace(device, uuid=f"{name}-{device.index}", node=name, tasks=""))
    return cluster
