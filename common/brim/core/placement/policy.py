"""Placement policies: pure scores for putting a demand on certain devices of a site (requirements A6, A7).

A score is a function of a `Trial`, which holds many candidates at once; it returns one number for each, higher is
better. Scores see one site at a time, never the rest of the cluster, so a site's scores stay valid until that site
changes. At a site the best candidate is taken, of equal ones the fullest device; between sites the best candidates'
scores are compared rounded down to 1/``resolution``, and of equal ones the first in the cluster's fixed order is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from brim.core.placement.outlook import STEPS, Floats, Outlook, Worth
from brim.core.placement.rooms import ENDLESS
from brim.core.placement.trial import Rated, Trial

Score = Callable[[Trial], Floats]


@dataclass(frozen=True, slots=True)
class Part:
    """A score that is a part of a site's worth: how much of it a candidate keeps (`Trial.kept`)."""

    part: str
    """One of `brim.core.placement.outlook.PARTS`."""

    def __call__(self, trial: Trial) -> Floats:
        """The score of each candidate."""
        return trial.kept(trial.outlook.worth(((self.part, 1.0),))).whole()


@dataclass(frozen=True, slots=True)
class Policy:
    """A weighted sum of named scores, rounded down to 1/``resolution``; without any, all places are equal."""

    name: str
    scores: tuple[tuple[str, float, Score], ...] = ()
    """(name, weight, function); weights are positive."""
    resolution: float = 1.0
    whole_site: bool = False
    """Whether scores look at more of a site than its open devices' free memory and its free CPU."""

    def worth(self, outlook: Outlook) -> Worth | None:
        """The worth whose gain the score is, in 1/``resolution``; None if there is more to it."""
        parts = self._worth_parts()
        return outlook.worth(parts) if len(parts) == len(self.scores) else None

    def _worth_parts(self) -> tuple[tuple[str, float], ...]:
        scores = self.scores
        return tuple([(score.part, weight * self.resolution) for _, weight, score in scores if isinstance(score, Part)])

    def rate(self, trial: Trial) -> Rated:
        """The scores of all candidates; between sites, whole numbers of them count."""
        parts = self._worth_parts()
        rated = trial.kept(trial.outlook.worth(parts)) if parts else Rated(0.0)
        if len(parts) == len(self.scores):
            return rated
        total: Floats | float = rated.whole()
        for _, weight, score in self.scores:
            if not isinstance(score, Part):
                total = total + score(trial) * (weight * self.resolution)
        return Rated(total)

    def parts(self, trial: Trial) -> dict[str, Floats]:
        """Each score by its name, unweighted, for `brim explain`."""
        return {name: np.broadcast_to(score(trial), trial.fits.shape) for name, _, score in self.scores}


# -- balanced: the preset principles of A7, each in [0, 1] --------------------------------------------------------


def server_load(trial: Trial) -> Floats:
    """A7, first principle: 1 − (executors in use after placement ÷ executors of the server)."""
    rooms = trial.rooms
    load: Floats = (rooms.busy + trial.classes.gpus) / rooms.executors
    return np.clip(1.0 - load, 0.0, 1.0)[:, None]


def memory_balance(trial: Trial) -> Floats:
    """A7, second principle: 1 − 2σ, σ the standard deviation of the GPUs' memory occupancy afterwards."""
    rooms = trial.rooms
    capacity = trial.of_devices(rooms.capacity)
    before = 1.0 - np.clip(trial.of_devices(rooms.room) / capacity, 0.0, 1.0)
    after = np.minimum(before + trial.of_cells(np.maximum(trial.classes.need, 0)) / capacity, 1.0)
    mean = (rooms.occupied[:, None] + trial.total(after - before)) / rooms.devices[:, None]
    square = (rooms.occupied2[:, None] + trial.total(after**2 - before**2)) / rooms.devices[:, None]
    return 1.0 - 2.0 * np.sqrt(np.maximum(square - mean**2, 0.0))


def satisfaction(trial: Trial) -> Floats:
    """A7, third principle: how little memory stops being usable for the tasks that are likely to come.

    1 − (usable memory lost ÷ capacity of the chosen GPUs), between 0 and 1. The expected loss is the fragmentation
    gradient of Weng et al., "Beware of Fragmentation", ATC'23.
    """
    lost = trial.claimed - likely_kept(trial)
    return np.clip(1.0 - lost / _capacity(trial), 0.0, 1.0)


def _capacity(trial: Trial) -> Floats:
    """Capacity of the chosen GPUs in steps, at least 1."""
    return np.maximum(trial.total(trial.of_devices(trial.rooms.capacity) / trial.outlook.step_mib), 1.0)


# -- packed: maximum capacity. All in thousandths of the largest GPU ----------------------------------------------

fill_kept = Part("fill")
"""Claimed memory − fall of the chosen GPUs' expected fill (`Outlook.fill`): minus the waste that is to come.

This is what finds the combinations that fill a GPU: 810 of 1,000 beside a task that takes 190 costs nothing, beside
none it costs what the 1,000 would have been filled with otherwise."""

usable_kept = Part("usable")
"""Claimed memory − fall of the site's usable memory, demands weighed by scarcity (`Outlook.scarce`).

FGD's gradient (Weng et al., ATC'23), with a larger say for demands that few servers can run."""

unstranded = Part("unstranded")
"""Fall of the free GPU memory that the server's free CPU cannot feed: X = max(0, free GPU − free CPU ÷ ĉ).

ĉ is the likely demands' mean CPU per GPU memory. A task that asks for more CPU than the mean goes where CPU is
plentiful."""

cheapness = Part("cheapness")
"""− claimed memory × price of the server's sort (`Outlook.price`): keep away from what others must have."""


# -- the others -----------------------------------------------------------------------------------------------------


likely_kept = Part("likely")
"""Claimed memory − fall of the site's usable memory, demands weighed by how often they come: − the fall of free
memory that is no fragment (Weng et al., ATC'23)."""


def fgd(trial: Trial) -> Floats:
    """Fragmentation gradient descent: 100 × sigmoid(fragmentation before − after), in GPUs (Weng et al., ATC'23).

    Rounded down to integers; this coarseness is part of what the published rule gains.
    """
    return 100.0 / (1.0 + np.exp(-likely_kept(trial) / STEPS))


def tightness(trial: Trial) -> Floats:
    """Best fit: 100 × (1 − ½ free CPU after ÷ largest CPU − ½ free GPU memory after ÷ largest server's), integers.

    As in Weng et al.; a server that has not declared its CPUs counts as without free CPU.
    """
    cpus = max((sort.cpu_milli for sort in trial.outlook.sorts), default=0)
    memory_mib = max((sum(sort.capacities_mib) for sort in trial.outlook.sorts), default=0)
    cpu = np.where(trial.rooms.cpu < ENDLESS, trial.fed.left, 0) / max(1, cpus)
    free_mib = (trial.rooms.site_free[:, None] - trial.claimed) * trial.outlook.step_mib
    return 100.0 * (1.0 - 0.5 * cpu[:, None] - 0.5 * free_mib / max(1, memory_mib))


def emptiness(trial: Trial) -> Floats:
    """Spread: ½ idle executors of the server after placement + ½ free part of the chosen GPUs, in [0, 1]."""
    left = trial.total(trial.before.astype(np.float64)) - trial.claimed
    return 0.5 * server_load(trial) + 0.5 * np.clip(left / _capacity(trial), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Preset:
    """A policy before its weights are chosen: its scores with their default weights."""

    scores: Mapping[str, tuple[float, Score]]
    resolution: float = 1.0
    whole_site: bool = False
    mean: bool = False
    """Whether weights are scaled to sum to 1."""


PRESETS: Mapping[str, Preset] = {
    "balanced": Preset(
        {
            "server_load": (1.0, server_load),
            "memory_balance": (1.0, memory_balance),
            "satisfaction": (1.0, satisfaction),
        },
        resolution=1e6,
        whole_site=True,
        mean=True,
    ),
    "packed": Preset(
        {
            "fill": (1.0, fill_kept),
            "usable": (0.03, usable_kept),
            "unstranded": (0.06, unstranded),
            "cheapness": (1.0, cheapness),
        },
        resolution=4.0,
    ),
    "spread": Preset({"emptiness": (1.0, emptiness)}, resolution=1e6, whole_site=True),
    "best-fit": Preset({"tightness": (1.0, tightness)}),
    "first-fit": Preset({}),
    "fgd": Preset({"fgd": (1.0, fgd)}),
}
"""Policies by the name that configs/placement.yaml uses, with the default weights of their scores."""


def make_policy(name: str, weights: Mapping[str, float] | None = None) -> Policy:
    """The policy of this name with these weights instead of the defaults; a weight of 0 leaves a score out.

    Raises ``ValueError`` naming the policy, score or weight that is wrong.
    """
    if name not in PRESETS:
        raise ValueError(f"policy: {name} is not one of {', '.join(PRESETS)}")
    preset, weights = PRESETS[name], weights or {}
    for score, weight in weights.items():
        if score not in preset.scores:
            known = ", ".join(preset.scores) or "none"
            raise ValueError(f"weights.{name}.{score}: policy {name} has no such score (it has {known})")
        if weight < 0:
            raise ValueError(f"weights.{name}.{score}: {weight:g} is negative")
    chosen = [(score, weights.get(score, default), function) for score, (default, function) in preset.scores.items()]
    chosen = [entry for entry in chosen if entry[1] > 0]
    scale = sum(weight for _, weight, _ in chosen) if preset.mean and chosen else 1.0
    scores = tuple((score, weight / scale, function) for score, weight, function in chosen)
    return Policy(name, scores, preset.resolution, preset.whole_site)
