"""Sites and demand classes as arrays: what is free at each site, and what each class asks for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import mul

import numpy as np

from brim.core.model import Demand, Device
from brim.core.placement.cluster import EVERYTHING, Site
from brim.core.placement.fit import UP, capacity_mib, milli
from brim.core.placement.outlook import STEPS, Bools, Floats, Form, Ints, Outlook, Worth, rounded

CLOSED = -1
"""Free memory in places of the arrays without an open device."""

ENDLESS = 10**12
"""Free memory when memory is not looked at, and free CPU of a server that has not declared any."""

POSITION_BITS = 10
POSITION = (1 << POSITION_BITS) - 1
"""A node has at most so many devices, and one more: what of an entry of `Reading.found` is a position."""

CPU_GRAIN = 2000
"""Scores see free CPU rounded down to so many thousandths; the fit rule sees it exactly."""

FEED_GRAIN = 2.0**-20
"""Steps that CPU can feed are rounded to multiples of this; see `brim.core.placement.outlook.GRAIN`."""


@dataclass(slots=True)
class Reading:
    """What decides about a site's scores: its open devices by rising free memory, and its free CPU."""

    found: Sequence[int]
    """For each: its code shifted by `POSITION_BITS`, and its position in ``Site.devices``; rising."""
    codes: Sequence[int]
    """For each: available MiB × 4 + 2 if its next executor is the last + 1 if nothing is held on it."""
    cpu: int
    """Exact free thousandths of a CPU."""
    marks: Sequence[int] = ()
    """For each of the site's devices what is in ``found``; `CLOSED` if it is not open."""

    @classmethod
    def of(cls, site: Site, ahead: int, least_mib: int, *, memory: bool) -> Reading:
        """Read a site, without devices that have less than ``least_mib``; the others as in the fit rule."""
        return cls((), (), 0).again(site, EVERYTHING, ahead, least_mib, memory)

    def again(self, site: Site, changed: int, ahead: int, least_mib: int, memory: bool) -> Reading:
        """Read the site once more, in the same way; only devices with a bit in ``changed`` are looked at."""
        devices = site.devices
        if changed == EVERYTHING:
            marks = [_mark(device, position, ahead, least_mib, memory) for position, device in enumerate(devices)]
        else:
            marks = list(self.marks)
            while changed:
                position = changed.bit_length() - 1
                marks[position] = _mark(devices[position], position, ahead, least_mib, memory)
                changed ^= 1 << position
        found = sorted(marks)
        if found and found[0] < 0:
            found = found[bisect_left(found, 0) :]
        cpu_milli = site.shape.cpu_milli
        cpu = cpu_milli - round(site.node.cpus_used * 1000) if cpu_milli > 0 else ENDLESS
        return Reading(found, [mark >> POSITION_BITS for mark in found], cpu, marks)

    @property
    def order(self) -> list[int]:
        """Positions in ``Site.devices`` by rising free memory; of equal ones the first comes first."""
        return [mark & POSITION for mark in self.found]

    def groups(self, kinds: Sequence[int] | None) -> Iterable[tuple[int, int | None, int]]:
        """(Code, kind, number) of each group of devices that are alike in all that counts, as they come in ``found``.

        ``kinds``: of the site's devices by position, if they differ; if not, none is told.
        """
        codes = self.codes
        if kinds is None:
            return [(code, None, codes.count(code)) for code in dict.fromkeys(codes)]
        alike = groupby([(mark >> POSITION_BITS, kinds[mark & POSITION]) for mark in self.found])
        return [(code, kind, len(list(group))) for (code, kind), group in alike]


def _mark(device: Device, position: int, ahead: int, least_mib: int, memory: bool) -> int:
    """One device's entry in `Reading.marks`."""
    slots = device.executors + ahead - device.busy
    if slots <= 0 or device.state != UP:
        return CLOSED
    held = device.committed_mib
    room = device.total_mib - device.headroom_mib - device.external_mib - held if memory else ENDLESS
    if room < least_mib:
        return CLOSED
    return (room * 4 + 2 * (slots == 1) + (held == 0) << POSITION_BITS) + position


class Rooms:
    """What is free at S sites with up to G groups of open devices each; arrays are [S, G] or [S].

    A group is a run of devices that are alike in all that counts. ``apart`` makes every device its own.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        readings: Sequence[Reading],
        forms: Sequence[Form],
        step_mib: int,
        *,
        apart: bool = False,
    ) -> None:
        """``step_mib``: the outlook's."""
        self._sites = sites
        self._readings = readings
        kinds = (
            forms[0].present if len(forms) == 1 else tuple(sorted({kind for form in forms for kind in form.present}))
        )
        self.kinds = kinds
        """The kinds of device at these sites."""
        self.starts: list[list[int]] = []
        """Of each site, the places of its groups' first devices in the reading."""
        rooms, steps, counts, numbers = [], [], [], []
        self.most = 0
        """The most steps available on one device."""
        for reading, form in zip(readings, forms, strict=True):
            codes = reading.codes
            if apart:
                sizes = [1] * len(codes)
            else:
                sizes = [count for _, _, count in reading.groups(form.kinds if len(kinds) > 1 else None)]
            starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
            room = [codes[at] >> 2 for at in starts]
            free = room if step_mib == 1 else [each // step_mib for each in room]
            if free and free[-1] > self.most:
                if free[-1] > STEPS:
                    free = [min(each, STEPS) for each in free]
                self.most = free[-1]
            self.starts.append(starts)
            rooms.append(room)
            steps.append(free)
            counts.append(sizes)
            numbers.append((form.sort, sum(map(mul, free, sizes)), reading.cpu // CPU_GRAIN * CPU_GRAIN))
        self._width = max([1, *map(len, rooms)])
        self.sort: Ints
        self.site_free: Ints
        self.cpu: Ints
        self.sort, self.site_free, self.cpu = np.array(numbers, dtype=np.int64).T
        """[S] each: sort of server; available steps of all open devices; free thousandths of a CPU, rounded down to
        `CPU_GRAIN`."""
        self.room: Ints
        self.free: Ints
        self.count: Ints
        self.room, self.free, self.count = np.array(
            [self._even(rooms, CLOSED), self._even(steps, 0), self._even(counts, 0)], dtype=np.int64
        )
        """[S, G] each: MiB available on each device, rising, `CLOSED` behind the last group; steps available on each;
        devices in the group."""
        self.last: Bools | None = (
            self._flags(2) if any([code & 2 for reading in readings for code in reading.codes]) else None
        )
        """[S, G] whether the next task would take the device's last executor; None if nowhere."""
        self.kind: Ints | int = kinds[0]
        """[S, G] the devices' kinds; a number if they are all of one."""
        if len(kinds) > 1:
            rows = zip(forms, readings, self.starts, strict=True)
            each = [[form.kinds[reading.found[at] & POSITION] for at in row] for form, reading, row in rows]
            self.kind = self._wide(each, kinds[0])

    def over_groups(self, values: Floats) -> Floats:
        """Sum [C, G] over a site's devices."""
        if len(self._readings) == 1:
            summed: Floats = values @ self.count[0]
        else:
            summed = np.add.reduce(values * self.count, axis=1)
        return summed

    def __len__(self) -> int:
        return len(self._readings)

    def _even(self, rows: Sequence[list[int]], rest: int) -> Sequence[list[int]]:
        """Rows of different lengths filled up with ``rest``."""
        width = self._width
        return [row if len(row) == width else row + [rest] * (width - len(row)) for row in rows]

    def _wide(self, rows: Sequence[list[int]], rest: int) -> Ints:
        return np.array(self._even(rows, rest), dtype=np.int64)

    def _flags(self, bit: int) -> Bools:
        rows = zip(self._readings, self.starts, strict=True)
        return self._wide([[reading.codes[at] & bit for at in row] for reading, row in rows], 0) > 0

    def _each(self, value: Callable[[Device], float], lowest: float = 0.0) -> Floats:
        return np.array([max(lowest, sum(value(device) for device in site.devices)) for site in self._sites])

    @cached_property
    def empty(self) -> Bools:
        """[S, G] whether nothing of brim's is held on the device."""
        return self._flags(1)

    @cached_property
    def capacity(self) -> Floats:
        """[S, D] MiB."""
        rows = zip(self._sites, self._readings, self.starts, strict=True)
        each = [[capacity_mib(site.devices[reading.found[at] & POSITION]) for at in row] for site, reading, row in rows]
        return self._wide(each, 1).astype(np.float64)

    @cached_property
    def busy(self) -> Floats:
        """[S] executors in use."""
        return self._each(lambda device: device.busy)

    @cached_property
    def executors(self) -> Floats:
        """[S] executors."""
        return self._each(lambda device: device.executors, 1.0)

    @cached_property
    def devices(self) -> Floats:
        """[S] number of devices, closed ones too."""
        return self._each(lambda _: 1.0, 1.0)

    @cached_property
    def occupied(self) -> Floats:
        """[S] sum of the occupied parts of all devices."""
        return self._each(occupancy)

    @cached_property
    def occupied2(self) -> Floats:
        """[S] sum of the squares of the occupied parts."""
        return self._each(lambda device: occupancy(device) ** 2)


class Classes:
    """Demand classes as arrays [K]. Host RAM and the exact CPU are left out; the board compares them itself."""

    def __init__(self, demands: Sequence[Demand], suits: Bools, outlook: Outlook) -> None:
        """``suits``: [K, kind], whether devices of a kind may take the class."""
        self.gpus = np.array([demand.gpus for demand in demands], dtype=np.int64)
        self.most_gpus = max((demand.gpus for demand in demands), default=0)
        bare = self.gpus == 0
        self.times: Floats | None = None if (self.gpus == 1).all() else self.gpus.astype(np.float64)[:, None]
        """[K, 1] GPUs; None if each is for one."""
        self.need = np.array([demand.vram_mib if demand.gpus else CLOSED for demand in demands], dtype=np.int64)
        self.steps = np.where(bare, 0, outlook.needed(self.need))
        self.claimed = (self.steps * self.gpus).astype(np.float64)
        self.cpu = np.array([milli(demand.cpus) for demand in demands], dtype=np.int64)
        whole = np.array([demand.whole for demand in demands], dtype=bool)
        self.whole: Bools | None = whole if whole.any() else None
        """Which classes wish for whole GPUs; None if none does."""
        self.suits = suits | bare[:, None]
        self.all_suit = bool(self.suits.all())
        self.cells = np.arange(len(self.gpus))
        self._fed: dict[int, Fed] = {}
        self._outlook = outlook

    def __len__(self) -> int:
        return len(self.need)

    def fed(self, cpu: Ints) -> Fed:
        """The CPU side of placements at sites with so much free CPU; remembered for single sites."""
        if len(cpu) > 1:
            return Fed.of(cpu, self, self._outlook)
        known = self._fed.get(int(cpu[0]))
        if known is None:
            known = self._fed[int(cpu[0])] = Fed.of(cpu, self, self._outlook)
        return known


@dataclass(slots=True)
class Fed:
    """The CPU side of C cells at S sites."""

    left: Ints
    """[C] free CPU after the placement."""
    level: Ints
    """[C] its level in the outlook."""
    level_now: Ints
    """[S] the level before."""
    row: Ints
    """[C, 1] where the `Worth` tables begin for ``level``."""
    row_now: Ints
    """[S, 1] likewise for ``level_now``."""
    feeds: Floats
    """[C] GPU steps that the CPU left can feed at the mean ratio."""
    feeds_now: Floats
    """[S] the same before."""
    enough: Floats
    """[C] free steps of the site up to which none are stranded after the placement."""

    @classmethod
    def of(cls, cpu: Ints, classes: Classes, outlook: Outlook) -> Fed:
        """``cpu`` [S] is free."""
        left, ratio = cpu - classes.cpu, outlook.cpu_per_step or 1.0
        level, level_now = outlook.level(left), outlook.level(cpu)
        rows = Worth.row(level)[:, None], Worth.row(level_now)[:, None]
        feeds, feeds_now = rounded(left / ratio, FEED_GRAIN), rounded(cpu / ratio, FEED_GRAIN)
        return cls(left, level, level_now, *rows, feeds, feeds_now, feeds + classes.claimed)


def occupancy(device: Device) -> float:
    """Occupied part of a device's capacity, between 0 and 1."""
    capacity = capacity_mib(device)
    return min(1.0, max(0.0, 1.0 - device.available_mib / capacity)) if capacity > 0 else 1.0
