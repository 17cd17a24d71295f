"""What the likely demands mean for free memory: the tables that placement scores look up.

Memory is counted here in *steps*, whole MiB that make up to a thousand in the largest device, so that scores mean the
same on every cluster; host CPUs in thousandths of one CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from brim.core.model import Demand
from brim.core.placement.cluster import Shape, Site
from brim.core.placement.fit import milli, suits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

STEPS = 1000
"""The largest device has at most so many steps of memory."""

GRAIN = 2.0**-32
"""Worths are rounded to multiples of this, so that their sums are exact: the same in whatever order they are added."""

COVERED = 0.95
"""Of the tasks seen, the share that the likely demands stand for; rarer demands are left out (Weng et al.)."""

OFFERS = 55
"""How many more tasks a free share of a GPU is imagined to be offered, in `Outlook.fill`. Few make it short-sighted,
many make it wait for combinations that hardly come; 40 to 65 pack alike."""

SCARCITY = 1.5
"""Exponent of scarcity, in `Outlook.scarce`: 0 weighs demands by how often they come alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides, apart from what is free, which demands a device may take."""

    model: str
    labels: frozenset[tuple[str, str]]
    tasks: str
    """The digest of the task names that its worker has registered."""

    def suits(self, demand: Demand) -> bool:
        """Whether the demand's constraints allow devices of this kind."""
        return suits(self.model, demand) and self.labels.issuperset(demand.labels)


@dataclass(frozen=True, slots=True)
class Sort:
    """Worker servers that are alike when empty: the kinds and capacities of their devices, and their CPUs."""

    kinds: tuple[int, ...]
    capacities_mib: tuple[int, ...]
    cpu_milli: int
    """-1 where the server has not declared its CPUs."""


@dataclass(frozen=True, slots=True)
class Form:
    """A site's shape in an outlook's numbers."""

    kinds: tuple[int, ...]
    """Of its devices by position."""
    sort: int
    present: tuple[int, ...]
    """The kinds that occur, at least one."""


def look(sites: Iterable[Site], shares: Sequence[tuple[Demand, float]]) -> tuple[Outlook, dict[Shape, Form]]:
    """The outlook for these sites, and the form of each shape among them."""
    kinds: dict[Kind, int] = {}
    sorts: dict[Sort, int] = {}
    counts: list[int] = []
    forms: dict[Shape, Form] = {}
    for shape in (site.shape for site in sites):
        if shape not in forms:
            of_devices = (Kind(model, shape.labels, tasks) for model, tasks, _ in shape.devices)
            numbers = tuple([kinds.setdefault(kind, len(kinds)) for kind in of_devices])
            sort = Sort(numbers, tuple([mib for _, _, mib in shape.devices]), shape.cpu_milli or -1)
            forms[shape] = Form(numbers, sorts.setdefault(sort, len(sorts)), tuple(sorted({*numbers})) or (0,))
            counts += [0] * (len(sorts) - len(counts))
        counts[forms[shape].sort] += 1
    return Outlook(shares, list(kinds), list(zip(sorts, counts, strict=True))), forms


class Outlook:
    """Tables for one mix of demands on one set of device kinds and server sorts; immutable.

    ``sorts`` comes with the number of servers of each sort. Without any demand seen, every table is zero.
    """

    def __init__(
        self, shares: Sequence[tuple[Demand, float]], kinds: Sequence[Kind], sorts: Sequence[tuple[Sort, int]]
    ) -> None:
        likely = _likely(shares)
        self.kinds = list(kinds)
        self.sorts = [sort for sort, _ in sorts]
        largest_mib = max((mib for sort in self.sorts for mib in sort.capacities_mib), default=0)
        self.step_mib = max(1, -(-largest_mib // STEPS))
        self.share = np.array([share for _, share in likely])
        self.gpus = np.array([demand.gpus for demand, _ in likely], dtype=np.int64)
        self.cpu = np.array([milli(demand.cpus) for demand, _ in likely], dtype=np.int64)
        self.need = self.needed(np.array([largest_mib if d.whole else d.vram_mib for d, _ in likely], dtype=np.int64))
        self.suits = np.array([[kind.suits(demand) for kind in kinds] for demand, _ in likely], dtype=bool)
        self.suits.shape = (len(likely), len(kinds))
        self._servers = np.array([number for _, number in sorts], dtype=np.float64)
        self._worths: dict[tuple[tuple[str, float], ...], Worth] = {}
        self.levels = np.unique(self.cpu[self.gpus > 0])
        """CPU amounts at which one more likely demand becomes possible."""

    def needed(self, mib: Ints) -> Ints:
        """Steps that these amounts of memory take up, 1 to `STEPS` + 1; rounded down like what is free, so that a
        demand is seen to fill a space of its own size exactly."""
        return np.clip(mib // self.step_mib, 1, STEPS + 1)

    def level(self, cpu_milli: Ints) -> Ints:
        """How many of ``levels`` these amounts of CPU reach."""
        return np.searchsorted(self.levels, cpu_milli, side="right")

    @cached_property
    def capacity(self) -> Floats:
        """Memory of each sort's servers together, in steps."""
        each = np.array([sum(sort.capacities_mib) for sort in self.sorts], dtype=np.float64)
        return each * self._servers / self.step_mib

    @cached_property
    def runs_on(self) -> Bools:
        """Whether an empty server of a sort could run a demand; [demand, sort]."""
        able = np.zeros((len(self.share), len(self.sorts)), dtype=bool)
        for column, sort in enumerate(self.sorts):
            capacity = np.array(sort.capacities_mib) / self.step_mib
            fits = self.suits[:, list(sort.kinds)] & (capacity >= np.minimum(self.need, STEPS)[:, None])
            fed = (sort.cpu_milli == -1) | (self.cpu <= sort.cpu_milli)
            able[:, column] = (fits.sum(axis=1) >= self.gpus) & fed
        return able

    @cached_property
    def scarce(self) -> Floats:
        """Weight of each demand in `usable`: p ÷ κ^`SCARCITY`.

        p is its share and κ the part of the cluster's memory on servers that could run it when empty: what few
        servers can run gets a larger say in what becomes of them. Demands without a GPU have none.
        """
        total = self.capacity.sum()
        kappa = self.runs_on @ self.capacity / total if total else np.zeros(len(self.share))
        reachable = (kappa > 0) & (self.gpus > 0)
        return np.where(reachable, self.share / np.where(reachable, kappa, 1.0) ** SCARCITY, 0.0)

    @cached_property
    def fill(self) -> Floats:
        """[steps + 1]: how much of a free share of a GPU will be filled in the end, in expectation.

        V₀ = 0 and V(r) ← V(r) + Σ p max(0, g + V(r − g) − V(r)), `OFFERS` times: each time one demand comes, with
        its share of memory g ≤ r, and is taken if that fills more in the end. A demand's chance to come is its
        share among those that ask for GPUs, whatever else they need. g + V(r − g) < V(r) is fragmentation to come:
        a free share of 1,000 where 810 is placed loses what 1,000 would have been filled with.
        """
        value = np.zeros(STEPS + 1)
        asking = (self.gpus > 0) & (self.need > 0) & (self.need <= STEPS)
        chances: dict[int, float] = {}
        for need, share in zip(self.need[asking].tolist(), self.share[asking].tolist(), strict=True):
            chances[need] = chances.get(need, 0.0) + share
        total = sum(chances.values())
        for _ in range(OFFERS if total else 0):
            gain = np.zeros(STEPS + 1)
            for need, chance in chances.items():
                better = need + value[:-need] - value[need:]
                gain[need:] += chance / total * np.maximum(better, 0.0)
            value += gain
        return value

    @cached_property
    def cpu_per_step(self) -> float:
        """Mean CPU (thousandths) per step of GPU memory over all likely demands that ask for GPUs."""
        asked = (self.share * self.gpus * np.minimum(self.need, STEPS)).sum()
        return float((self.share * self.cpu)[self.gpus > 0].sum() / asked) if asked else 0.0

    @cached_property
    def price(self) -> Floats:
        """[sort]: how much a server sort is asked for, per memory it has, when demand is shared out most evenly.

        The likely demands, scaled to fill the whole cluster, are spread over the sorts that can run them so that
        the loads come as close to each other as they can; 1 is the mean. Sorts above 1 are those that demands bound to
        them overfill anyway. Found by multiplicative weights.
        """
        size = self.share * self.gpus * np.minimum(self.need, STEPS)
        total = self.capacity.sum()
        if not size.sum() or not total:
            return np.zeros(len(self.sorts))
        able = self.runs_on[size > 0] * self.capacity
        asked = size[size > 0] / size.sum() * total
        asked, able = asked[able.any(axis=1)], able[able.any(axis=1)]
        favour = np.ones(len(self.sorts))
        load = np.zeros(len(self.sorts))
        for round_ in range(400):
            spread = able * favour
            load = (asked[:, None] * spread / spread.sum(axis=1, keepdims=True)).sum(axis=0) / np.maximum(
                self.capacity, 1e-9
            )
            favour *= np.exp((1.0 - load) * 0.5 / (1.0 + round_ / 20))
            favour = np.maximum(favour / favour.max(), 1e-9)
        return load

    @cached_property
    def usable_scarce(self) -> Usable:
        """What is usable, demands weighed by scarcity."""
        return Usable(self, self.scarce)

    @cached_property
    def usable_likely(self) -> Usable:
        """What is usable, demands weighed by how often they come alone (FGD)."""
        return Usable(self, np.where(self.gpus > 0, self.share, 0.0))

    def worth(self, parts: tuple[tuple[str, float], ...]) -> Worth:
        """The worth of a site's state as a weighted sum of parts, made once for each choice of them."""
        if parts not in self._worths:
            self._worths[parts] = Worth(self, dict(parts))
        return self._worths[parts]


class Usable:
    """Memory that a task drawn from the weighed demands could use, in expectation (Weng et al., ATC'23).

    For one demand on one server: the sum of free memory over the GPUs that could take it, if there are enough of
    them and CPU for it; else 0. Demands for one GPU are a table over one device's free memory; demands for several
    are tables over how many devices have enough.
    """

    def __init__(self, outlook: Outlook, weight: Floats) -> None:
        kinds, levels = len(outlook.kinds), len(outlook.levels) + 1
        self._level = outlook.level
        level = outlook.level(outlook.cpu)
        self.single = np.zeros((kinds, levels, STEPS + 1))
        """[kind, CPU level, free steps] → usable steps of one device."""
        self.several: list[tuple[int, Floats]] = []
        """(need in steps, [kind, CPU level, number of devices with that much] → weight)."""
        needs = outlook.need[(outlook.gpus > 1) & (weight > 0)]
        tables = {int(need): np.zeros((kinds, levels, 65)) for need in np.unique(np.minimum(needs, STEPS))}
        for row in np.flatnonzero((weight > 0) & (outlook.gpus > 0)):
            for kind in np.flatnonzero(outlook.suits[row]):
                if outlook.gpus[row] == 1:
                    self.single[kind, level[row] :, outlook.need[row] :] += weight[row]
                else:
                    tables[min(int(outlook.need[row]), STEPS)][kind, level[row] :, outlook.gpus[row] :] += weight[row]
        self.single *= np.arange(STEPS + 1)
        self.several = sorted(tables.items())

    def at(self, kinds: Sequence[int], free: Sequence[int], cpu_milli: int) -> float:
        """Usable steps of one site: kind and free steps of each open device, and free CPU."""
        level = int(self._level(np.array([cpu_milli]))[0])
        total = float(sum(self.single[kind, level, steps] for kind, steps in zip(kinds, free, strict=True)))
        for need, weight in self.several:
            for kind in set(kinds):
                enough = [steps for of, steps in zip(kinds, free, strict=True) if of == kind and steps >= need]
                total += float(weight[kind, level, len(enough)]) * sum(enough)
        return total


PARTS = ("fill", "usable", "likely", "unstranded", "cheapness")
"""What a `Worth` may be made of: `Outlook.fill`; `Outlook.usable_scarce`; `Outlook.usable_likely`; minus the free GPU
memory that free CPU cannot feed at the mean ratio; minus the held memory times `Outlook.price`."""


class Worth:
    """What the state of a site is worth, as a weighted sum of `PARTS`; a placement keeps more or less of it.

    Everything that depends on one device's free memory is one table, so that all parts cost one look-up. All numbers
    are multiples of `GRAIN`.
    """

    def __init__(self, outlook: Outlook, weights: Mapping[str, float]) -> None:
        weight = {part: weights.get(part, 0.0) for part in PARTS}
        kinds, levels = len(outlook.kinds), len(outlook.levels) + 1
        table = np.zeros((kinds, levels, STEPS + 1))
        if weight["fill"]:
            table += weight["fill"] * outlook.fill
        self.several: list[tuple[int, Floats]] = []
        """As in `Usable`."""
        for part in ("usable", "likely"):
            if weight[part]:
                usable = outlook.usable_scarce if part == "usable" else outlook.usable_likely
                table += weight[part] * usable.single
                self.several += [(need, rounded(weight[part] * each)) for need, each in usable.several]
        table = rounded(table)
        self.claims = float(rounded(weight["fill"] + weight["usable"] + weight["likely"]))
        """What a step is worth in the hands of a task."""
        self.unstranded = float(rounded(weight["unstranded"], 2.0**-12)) if outlook.cpu_per_step else 0.0
        self.price = rounded(weight["cheapness"] * outlook.price) if weight["cheapness"] else None
        """[sort], for each step in the hands of a task."""
        # In front, as much as a demand that does not fit reaches below the first row.
        front = np.zeros(STEPS + 1)
        # Kinds that suit the same demands share a table, which then stays in the processor's cache.
        shared: dict[bytes, Floats] = {}
        self._of_kind = [
            shared.setdefault(outlook.suits[:, kind].tobytes(), np.concatenate([front, table[kind].ravel()]))
            for kind in range(kinds)
        ]
        self._of_all = np.concatenate([front, table.ravel()])
        self._kind_size = table[0].size if kinds else 0

    def of(self, kind: Ints | int, row: Ints, steps: Ints) -> Floats:
        """Of devices of these kinds, rows (`Worth.row`) and free steps, broadcast against each other."""
        if isinstance(kind, int):
            return self.at(kind, row + steps)
        found: Floats = self._of_all.take(kind * self._kind_size + row + steps)
        return found

    def at(self, kind: int, at: Ints | int) -> Floats:
        """Of devices of one kind at these sums of row and steps."""
        found: Floats = self._of_kind[kind].take(at)
        return found

    @staticmethod
    def row(level: Ints) -> Ints:
        """Where the tables begin for these CPU levels."""
        return (level + 1) * (STEPS + 1)


def rounded(values: Floats | float, grain: float = GRAIN) -> Floats:
    """The nearest multiples of ``grain``, a power of two."""
    nearest: Floats = np.round(np.asarray(values) / grain) * grain
    return nearest


def _likely(shares: Sequence[tuple[Demand, float]]) -> list[tuple[Demand, float]]:
    """The commonest demands that stand for `COVERED` of the tasks, their shares scaled to sum to 1."""
    chosen: list[tuple[Demand, float]] = []
    covered = 0.0
    for demand, share in sorted(shares, key=lambda pair: -pair[1]):
        if covered >= COVERED:
            break
        chosen.append((demand, share))
        covered += share
    return [(demand, share / covered) for demand, share in chosen]
