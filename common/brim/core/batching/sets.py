"""The pair of level-2 task sets of an executor (requirements B4, B5).

Membership is settled only when computation starts. Until then an executor just holds items, in order, and its
task sets are *derived*: each key's items cut into the fewest batches. An executor that computes has one set
left to fill, another has both. Placement and the executor derive the sets by this same code, so they agree on
what fits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from brim.core.batching.items import BatchKey, Item
from brim.core.batching.volume import EMPTY, Limits, Load, append, cut
from brim.core.model import Reason

PAIR = 2
"""Task sets of an executor, the computed one included."""

_order = attrgetter("order")


class TaskSets:
    """Items held by an executor and not sealed yet, by key, and the task sets they make up."""

    def __init__(self, limits: Limits, held: Mapping[BatchKey, Iterable[Item]] | None = None) -> None:
        self._limits = limits
        self._held = {key: sorted(items, key=_order) for key, items in (held or {}).items()}
        self._loads: dict[BatchKey, list[Load]] = {}
        self.limits = limits

    @property
    def limits(self) -> Limits:
        """What one set may hold; setting it cuts the sets anew."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._loads = {key: self._cut(key) for key in self._held}

    def __iter__(self) -> Iterator[tuple[BatchKey, list[Item]]]:
        """Each key with its items in order, the key of the oldest item first."""
        return iter(sorted(self._held.items(), key=lambda entry: entry[1][0].order))

    def __bool__(self) -> bool:
        return bool(self._held)

    def count(self) -> int:
        """How many task sets the items make up."""
        return sum(map(len, self._loads.values()))

    def last(self, key: BatchKey) -> Load | None:
        """The load of the newest set of this key, which the next item would join; None if there is none."""
        return self._loads[key][-1] if key in self._loads else None

    def shortage(self, key: BatchKey, item: Item, room: int) -> Reason | None:
        """Why the item cannot be added when there is room for so many sets, or None if it can."""
        if (alone := self._limits.shortage(EMPTY + item.size)) is not None:
            return alone
        others = self.count() - len(self._loads.get(key, ()))
        if others + len(self._with(key, item)) <= room:
            return None
        last = self.last(key)
        full = self._limits.shortage(last + item.size) if last is not None else None
        return full or Reason("task_sets", f"every task set of the executor holds another key than {key}")

    def add(self, key: BatchKey, item: Item) -> None:
        """Take the item at its place in order."""
        loads = self._with(key, item)
        insort(self._held.setdefault(key, []), item, key=_order)
        self._loads[key] = loads

    def remove(self, key: BatchKey, ids: Iterable[str]) -> None:
        """Let go of the items with these ids."""
        gone = set(ids)
        self._held[key] = [item for item in self._held[key] if item.id not in gone]
        if self._held[key]:
            self._loads[key] = self._cut(key)
        else:
            del self._held[key], self._loads[key]

    def beyond(self, room: int) -> list[tuple[BatchKey, Item]]:
        """The items that must go if there is room for so many sets: those of the newest sets."""
        sets = sorted(
            (
                (self._held[key][end - load.items].order, key, end - load.items, end)
                for key, loads in self._loads.items()
                for load, end in _ends(loads)
            ),
        )
        return [(key, item) for _, key, start, end in sets[room:] for item in self._held[key][start:end]]

    def _cut(self, key: BatchKey) -> list[Load]:
        return cut((item.size for item in self._held[key]), self._limits)

    def _with(self, key: BatchKey, item: Item) -> list[Load]:
        """The key's sets once it holds the item too."""
        held = self._held.get(key, [])
        if held and item.order < held[-1].order:
            return cut((each.size for each in sorted([*held, item], key=_order)), self._limits)
        loads = self._loads.get(key, [])[:]
        append(loads, item.size, self._limits)
        return loads


def _ends(loads: Iterable[Load]) -> Iterator[tuple[Load, int]]:
    end = 0
    for load in loads:
        end += load.items
        yield load, end
