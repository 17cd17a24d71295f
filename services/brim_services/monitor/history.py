"""Throughput and waits of the last 15 minutes, from the tasks that have ended: a restart loses none of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from brim.store import Store
from brim.store.live import Ending

SPAN_S = 900
STEP_S = 15
SLOTS = SPAN_S // STEP_S
MOST = 5000
"""How many ends are looked at in one go; of more, the latest."""
MOST_WAITS = 200
"""How many waits one step keeps for its quantiles."""
SETTLE_MS = 200
"""Ends are read this much later, since one script's time is not seen by another before it has ended."""


class Slot:
    """What ended in one step of time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = 0
        self.waits: list[float] = []

    def add(self, ending: Ending) -> None:
        """Counts one task."""
        self.ended += 1
        if ending.waited_s is not None and len(self.waits) < MOST_WAITS:
            self.waits.append(max(0.0, ending.waited_s))


class History:
    """The last slots, oldest first. Times are the server's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._slots: deque[Slot] = deque(maxlen=SLOTS)
        self._until_ms = -1
        self.fresh: Sequence[Ending] = ()
        """What `extend` found last, but not in the past before this process."""

    def extend(self, now_s: float) -> None:
        """Takes in what has ended since the last call. Raises what Redis raises."""
        until_ms = round(now_s * 1000) - SETTLE_MS
        first = self._until_ms < 0
        after_ms = until_ms - SPAN_S * 1000 if first else self._until_ms
        endings = self._store.ends_between(after_ms, until_ms, MOST)
        self._until_ms = max(until_ms, self._until_ms)
        for ending in endings:
            self._slot(ending.ended_s).add(ending)
        self.fresh = () if first else endings

    def series(self, now_s: float) -> dict[str, object]:
        """``per_s`` (tasks that ended), ``wait_p50_s`` and ``wait_p95_s`` (null: none placed), a step a value."""
        slots = {slot.number: slot for slot in self._slots}
        # The step that is under way is left out: it would look like a fall.
        numbers = range(int(now_s) // STEP_S - SLOTS, int(now_s) // STEP_S)
        chosen = [slots.get(number) or Slot(number) for number in numbers]
        return {
            "step_s": STEP_S,
            "per_s": [round(slot.ended / STEP_S, 3) for slot in chosen],
            "wait_p50_s": [quantile(slot.waits, 0.5) for slot in chosen],
            "wait_p95_s": [quantile(slot.waits, 0.95) for slot in chosen],
        }

    def _slot(self, at_s: float) -> Slot:
        number = int(at_s) // STEP_S
        if not self._slots or number > self._slots[-1].number:
            self._slots.append(Slot(number))
        for slot in reversed(self._slots):
            if slot.number <= number:
                return slot
        return self._slots[0]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None of none."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 3)
