"""Where a task could go, what each place scores and why, and what is in the way elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brim.core.model import Demand, Reason
from brim.core.placement.board import Board
from brim.core.placement.cluster import Cluster
from brim.core.placement.fit import node_shortage
from brim.core.placement.mix import Mix
from brim.core.placement.policy import Policy
from brim.core.placement.survey import NEARNESS, miss


@dataclass(frozen=True, slots=True)
class Candidate:
    """Devices of one node that could take the task now."""

    node: str
    devices: tuple[str, ...]
    score: float
    """Between nodes compared rounded down, see `brim.core.placement.policy`."""
    parts: dict[str, float]
    """Each score by its name, times its weight; they add up to ``score``."""
    alike: int = 1
    """Choices at the node that are alike in everything that counts, this one among them."""


@dataclass(frozen=True, slots=True)
class Out:
    """A node that cannot take the task now."""

    node: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Explanation:
    """All candidates, the chosen one first and then by score, and the nodes without any, the nearest first."""

    candidates: list[Candidate]
    out: list[Out]


def explain(
    cluster: Cluster, policy: Policy, mix: Mix, demand: Demand, task: str, *, memory: bool = True
) -> Explanation:
    """Rate every place where one task could start now by the rule that decides; promises are left aside.

    ``memory`` is that of the fit rule.
    """
    board = Board(cluster, policy, mix, memory=memory)
    row = board.row(demand, task)
    chosen = board.best(row, demand.ram_mib)
    found: list[tuple[tuple[bool, float, int, float], Candidate]] = []
    out: list[tuple[tuple[int, int, int], Out]] = []
    for place, site in enumerate(cluster):
        at_site = [] if node_shortage(site.node, demand) is not None else _candidates(board, row, site.name)
        if not at_site:
            if not any(cluster.runs(device, task) for device in site.devices):
                reason = Reason("no_worker", f"no worker on {site.name} has registered {task}")
                out.append(((len(NEARNESS), 0, place), Out(site.name, reason)))
                continue
            obstacle = miss(cluster, site, demand, task, memory=memory)
            assert obstacle.reason is not None
            out.append(((obstacle.rank, obstacle.amount, place), Out(site.name, obstacle.reason)))
            continue
        best = max(candidate.score for candidate in at_site)
        for candidate in at_site:
            first = chosen is not None and (candidate.node, candidate.devices) == (
                chosen.node,
                tuple(cluster[chosen.node].devices[position].uuid for position in chosen.positions),
            )
            turn = not first, -float(np.floor(best * policy.resolution)), place, -candidate.score
            found.append((turn, candidate))
    found.sort(key=lambda entry: entry[0])
    out.sort(key=lambda entry: entry[0])
    return Explanation([candidate for _, candidate in found], [each for _, each in out])


def _candidates(board: Board, row: int, name: str) -> list[Candidate]:
    site = board.cluster[name]
    trial, reading = board.trial(row, site)
    parts, weights = board.policy.parts(trial), {score: weight for score, weight, _ in board.policy.scores}
    gpus = int(trial.classes.gpus[0])
    found = []
    for candidate in np.flatnonzero(trial.fits[0]).tolist():
        positions = sorted(reading.order[at] for at in trial.places(0, candidate))
        weighed = {score: weights[score] * float(values[0, candidate]) for score, values in parts.items()}
        alike = 1 if gpus != 1 else int(trial.rooms.count[0, candidate])
        uuids = tuple(site.devices[position].uuid for position in positions)
        found.append(Candidate(name, uuids, sum(weighed.values()), weighed, alike))
    return found
