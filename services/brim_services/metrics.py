"""Prometheus metrics of every service, by name, unit and label; docs/monitoring.md lists them.

Each service owns a registry, so several may live in one process. Base units: seconds, bytes, ratios.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import brim
from brim.core.model import State
from brim.store.live import Ending
from brim_services.picture import Picture

log = logging.getLogger("brim")

MIB = 1 << 20
WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
DECISIONS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
RATIOS = (0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


def new_registry() -> CollectorRegistry:
    """A service's registry: its process's own figures and brim's version are in it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    build = Gauge("brim_build_info", "brim's version.", ["version"], registry=registry)
    build.labels(brim.__version__).set(1)
    return registry


def serve(registry: CollectorRegistry, host: str, port: int) -> None:
    """Shows a registry under http://host:port/metrics; port 0: not at all. A taken port is told, not fatal."""
    if not port:
        return
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        log.warning("no metrics at http://%s:%d/metrics: %s", host, port, error.strerror)
    else:
        log.info("metrics: http://%s:%d/metrics", host, port)


class IntakeMetrics:
    """What intake has done with messages."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.messages = Counter(
            "brim_intake_messages_total",
            "Messages by what admission did with them.",
            ["answer"],
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            "brim_intake_batch_seconds",
            "From looking at a batch of messages until it is admitted.",
            buckets=DECISIONS_S,
            registry=self.registry,
        )


class PlacementMetrics:
    """What placement has decided, how fast, and how long tasks had waited."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.active = Gauge(
            "brim_placement_active", "1 for the active placement, 0 for a standby.", registry=self.registry
        )
        self.decision_seconds = Histogram(
            "brim_placement_decision_seconds",
            "One plan over the whole mirror.",
            buckets=DECISIONS_S,
            registry=self.registry,
        )
        self.commits = Counter(
            "brim_placement_commits_total", "Commits by their answer.", ["answer"], registry=self.registry
        )
        self.wait_seconds = Histogram(
            "brim_wait_seconds",
            "From admission to placement, by task.",
            ["task"],
            buckets=WAITS_S,
            registry=self.registry,
        )


class AgentMetrics:
    """What a node agent has measured and set right."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.report_seconds = Histogram(
            "brim_agent_report_seconds",
            "Sampling the node's devices and publishing the report.",
            buckets=DECISIONS_S,
            registry=self.registry,
        )
        self.settled = Counter(
            "brim_agent_attempts_settled_total",
            "Attempts that the agent ended itself, by reason: their process, worker or message was gone.",
            ["reason"],
            registry=self.registry,
        )
        self.restarts = Counter(
            "brim_agent_worker_restarts_total", "Workers that were ended to be started anew.", registry=self.registry
        )


class ClusterMetrics(Collector):
    """The cluster as the monitor sees it: its latest picture, and counts of what has ended since it started."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.tasks = Counter(
            "brim_tasks_total", "Tasks that have ended since the monitor started.", ["state"], registry=self.registry
        )
        self.estimate_error = Histogram(
            "brim_estimate_error_ratio",
            "Measured peak over what was reserved, of tasks that have ended; above 1 the reservation was too small.",
            ["task"],
            buckets=RATIOS,
            registry=self.registry,
        )
        for state in ("succeeded", "failed", "cancelled", "expired", "dead"):
            self.tasks.labels(state)
        self._picture: Picture | None = None
        self.registry.register(self)

    def observe(self, picture: Picture, endings: Sequence[Ending]) -> None:
        """Takes over a picture, and tasks that have ended since the one before."""
        self._picture = picture
        for ending in endings:
            self.tasks.labels(ending.state).inc()
            if ending.peak_mib is not None and ending.reserved_mib:
                self.estimate_error.labels(ending.task).observe(ending.peak_mib / ending.reserved_mib)

    def collect(self) -> Iterator[Metric]:
        """The latest picture as gauges."""
        picture = self._picture
        if picture is None:
            return
        memory = GaugeMetricFamily("brim_gpu_memory_bytes", "Memory of a GPU by kind.", labels=["node", "gpu", "kind"])
        executors = GaugeMetricFamily("brim_gpu_executors", "Executors of a GPU.", labels=["node", "gpu"])
        busy = GaugeMetricFamily("brim_gpu_executors_busy", "Executors that a task holds.", labels=["node", "gpu"])
        up = GaugeMetricFamily("brim_gpu_up", "1 if the GPU takes tasks.", labels=["node", "gpu"])
        for gpu in picture.gpus.values():
            name = [gpu.node, str(gpu.index)]
            for kind in ("total", "headroom", "external", "counted", "reserved", "measured", "available"):
                memory.add_metric([*name, kind], getattr(gpu, f"{kind}_mib") * MIB)
            executors.add_metric(name, gpu.executors)
            busy.add_metric(name, gpu.busy)
            up.add_metric(name, gpu.state == "up")
        depth = GaugeMetricFamily("brim_overflow_depth", "Tasks that wait in overflow, by task.", labels=["task"])
        oldest = GaugeMetricFamily(
            "brim_overflow_oldest_seconds",
            "How long the first task of the oldest lane waits, by task.",
            labels=["task"],
        )
        depths: dict[str, int] = {}
        ages: dict[str, float] = {}
        for lane in picture.lanes.values():
            depths[lane.task] = depths.get(lane.task, 0) + lane.depth
            ages[lane.task] = max(ages.get(lane.task, 0.0), picture.at_s - lane.head_since_s)
        for task, waiting in depths.items():
            depth.add_metric([task], waiting)
            oldest.add_metric([task], ages[task])
        tasks = GaugeMetricFamily("brim_tasks", "Tasks that brim knows, by state.", labels=["state"])
        for state in State:
            tasks.add_metric([state], picture.counts.get(state, 0))
        nodes = GaugeMetricFamily("brim_node_renewed_seconds_ago", "Since a node's last renewal.", labels=["node"])
        for node in picture.nodes.values():
            nodes.add_metric([node.name], picture.at_s - node.renewed_s)
        yield from (memory, executors, busy, up, depth, oldest, tasks, nodes)
        yield GaugeMetricFamily("brim_intake_backlog", "Messages that wait for intake.", picture.intake_backlog)
        yield GaugeMetricFamily(
            "brim_placement_leader", "1 while a placement holds the lease.", int(picture.placement_active)
        )
