"""Placement policies: pure scores for putting a demand on certain devices of a site (requirements A6, A7).

A policy sees one site before the placement and the devices chosen there, and gives each of its parts a score
in [0, 1], higher is better. It never sees the rest of the cluster, so a site's scores stay valid until that
site changes. Sites and choices with equal scores are taken in the cluster's fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import pstdev

from brim.core.model import Demand, Device
from brim.core.placement.cluster import Site
from brim.core.placement.fit import UP, capacity_mib, node_shortage
from brim.core.placement.mix import Mix

Choice = tuple[int, ...]
"""Positions in ``Site.devices``, one for each GPU of the demand."""

Score = Callable[[Site, Choice, Demand, Mix], float]

RESOLUTION = 1_000_000
"""Scores are compared in millionths, so that rounding noise decides nothing."""


def server_load(site: Site, choice: Choice, demand: Demand, mix: Mix) -> float:
    """A7, first principle: 1 − (executors in use after placement ÷ executors of the server)."""
    executors = sum(device.executors for device in site.devices)
    in_use = sum(device.busy for device in site.devices) + len(choice)
    return max(0.0, 1.0 - in_use / executors)


def memory_balance(site: Site, choice: Choice, demand: Demand, mix: Mix) -> float:
    """A7, second principle: 1 − 2σ, σ the standard deviation of the GPUs' memory occupancy afterwards."""
    after = site.holding(choice, demand)
    occupancy = [_occupancy(device) for device in after.devices if capacity_mib(device) > 0]
    return 1.0 - 2.0 * pstdev(occupancy)


def satisfaction(site: Site, choice: Choice, demand: Demand, mix: Mix) -> float:
    """A7, third principle: how little memory stops being usable for the tasks that are likely to come.

    1 − (usable memory lost ÷ capacity of the chosen GPUs), at least 0; usable memory is that of `usable_mib`.
    The expected loss is the fragmentation gradient of Weng et al., "Beware of Fragmentation", ATC'23.
    """
    lost_mib = usable_mib(site, mix) - usable_mib(site.holding(choice, demand), mix)
    capacity = sum(capacity_mib(site.devices[position]) for position in choice)
    return min(1.0, max(0.0, 1.0 - lost_mib / capacity))


def usable_mib(site: Site, mix: Mix) -> float:
    """Free memory of the site that a task drawn from the mix could use, in expectation.

    For one demand: the sum of available memory over the GPUs that could take it, if there are enough of them
    and the server has what else it asks for; else 0.
    """
    total = 0.0
    for demand, share in mix.shares():
        rooms = [device.available_mib for device in site.devices if _could_take(device, demand)]
        if len(rooms) >= demand.gpus and node_shortage(site.node, demand) is None:
            total += share * sum(rooms)
    return total


def _could_take(device: Device, demand: Demand) -> bool:
    return (
        device.state == UP
        and device.busy < device.executors
        and device.available_mib >= demand.vram_mib
        and (not demand.gpu_models or device.model in demand.gpu_models)
    )


def _occupancy(device: Device) -> float:
    return min(1.0, 1.0 - device.available_mib / capacity_mib(device))


@dataclass(frozen=True, slots=True)
class Policy:
    """A weighted mean of named scores; without any, all places are equal and the first one wins."""

    name: str
    scores: tuple[tuple[str, float, Score], ...] = ()
    """(name, weight, function); weights are positive."""

    def parts(self, site: Site, choice: Choice, demand: Demand, mix: Mix) -> dict[str, float]:
        """Each score by its name, for `brim explain`."""
        return {name: score(site, choice, demand, mix) for name, _, score in self.scores}

    def rate(self, site: Site, choice: Choice, demand: Demand, mix: Mix) -> int:
        """The weighted mean of the parts in millionths; higher is better."""
        if not self.scores:
            return 0
        total = sum(weight * score(site, choice, demand, mix) for _, weight, score in self.scores)
        return round(RESOLUTION * total / sum(weight for _, weight, _ in self.scores))


def balanced(weights: Mapping[str, float] | None = None) -> Policy:
    """All three principles of A7, by default weighed alike; a weight of 0 leaves a score out."""
    weights = weights or {}
    scores: dict[str, Score] = {
        "server_load": server_load,
        "memory_balance": memory_balance,
        "satisfaction": satisfaction,
    }
    weighed = ((name, weights.get(name, 1.0), score) for name, score in scores.items())
    return Policy("balanced", tuple(entry for entry in weighed if entry[1] > 0))


def first_fit() -> Policy:
    """The first place in the fixed order (Weng et al. leave it out, though it beats their baselines)."""
    return Policy("first-fit")


PRESETS: Mapping[str, Callable[[], Policy]] = {"balanced": balanced, "first-fit": first_fit}
"""Policies by the name that configs/placement.yaml uses."""
