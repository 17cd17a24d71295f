"""The heads of all lanes as arrays, so that a plan looks at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import is_, is_not
from typing import Final

import numpy as np

from brim.core.model import Demand
from brim.core.placement.outlook import Floats


@dataclass(slots=True)
class Waiting:
    """One task in overflow; the lower its ``score`` (priority, then age), the earlier its turn.

    A value, like a `Device` not ``frozen``: a mirror makes one for each task of a lane that has changed.
    """

    task_id: Final[str]
    score: Final[float]
    admitted_s: Final[float]


@dataclass(slots=True)
class Lane:
    """Waiting tasks with one name and one demand, by score; ``waiting`` may be only the lane's front.

    A value like a `Waiting`.
    """

    key: Final[str]
    task: Final[str]
    demand: Final[Demand]
    waiting: Final[Sequence[Waiting]]

    def asks_like(self, other: Lane) -> bool:
        """Whether its tasks have the same name and the same demand as the other's."""
        alike = self.demand is other.demand or self.demand == other.demand
        return alike and self.task == other.task


class Heads:
    """The lanes in which something waits, and their heads; by *place* 0 to L − 1, which follows the lanes' keys."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.places: dict[str, int] = {}
        """By key."""
        self.first: list[Waiting] = []
        """The head of each lane."""
        self.scores: Floats = np.zeros(0)
        self.admitted_s: Floats = np.zeros(0)
        """[L] of the heads."""
        self.given: list[Lane] = []
        """The lanes as they were told last."""

    def look(self, given: list[Lane]) -> bool:
        """Take over the lanes and their heads; whether they are others than before, or ask for something else.

        In each of them something waits.
        """
        as_before = len(given) == len(self.given) and all(map(is_, given, self.given))
        others = not as_before and self._take(given)
        first = [lane.waiting[0] for lane in self.lanes]
        if others:
            self.scores = np.array([head.score for head in first], dtype=np.float64)
            self.admitted_s = np.array([head.admitted_s for head in first], dtype=np.float64)
        else:
            for place in compress(count(), map(is_not, first, self.first)):
                self.scores[place], self.admitted_s[place] = first[place].score, first[place].admitted_s
        self.first = first
        return others

    def _take(self, given: list[Lane]) -> bool:
        """Take over other lanes, of which most may be in the same places."""
        by_key = {lane.key: lane for lane in given}
        others = by_key.keys() != self.places.keys() or any(not by_key[lane.key].asks_like(lane) for lane in self.lanes)
        if others:
            self.places = {key: place for place, key in enumerate(sorted(by_key))}
        self.lanes = [by_key[key] for key in self.places]
        self.given = given
        return others
