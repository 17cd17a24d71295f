"""The score board: for every demand class and every site the best score, kept up to date change by change.

A decision costs about the change since the last one: a change at a site rewrites that site's column, usually from
memory, and a decision is one search along the class's row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from brim.core.model import Demand
from brim.core.placement.cluster import EVERYTHING, Cluster, Shape, Site
from brim.core.placement.columns import Columns, Group
from brim.core.placement.fit import milli
from brim.core.placement.mix import Mix
from brim.core.placement.outlook import Form, Ints, look
from brim.core.placement.policy import Policy
from brim.core.placement.rooms import CPU_GRAIN, POSITION, Classes, Reading, Rooms
from brim.core.placement.trial import NONE, NOWHERE, Scores, Trial

REMEMBERED = 20_000
"""Columns kept by what is free at a site; when there are more, all are forgotten."""

LOGGED = 100_000
"""Rewritten columns that are remembered for classes that wait; when there are more, all classes are tried again."""

TRIES = 5
"""Sites with too little host RAM that are passed over one by one, before all of them are."""

LOOK_EVERY = 100
"""After so many observations the mix is compared with the one that the scores rest on."""

DRIFT = 0.05
"""They are computed anew once so much of the mix (total variation) has moved."""


@dataclass(slots=True)
class Spot:
    """The best place for a class: devices (by position) of a node, and its score."""

    node: str
    positions: tuple[int, ...]
    score: int


@dataclass(slots=True)
class _Column:
    """What classes score at a site, and which of its groups of devices is the best for each."""

    scores: Scores
    starts: list[int]
    """Where the groups begin in the reading."""
    firsts: dict[int, int] = field(default_factory=dict)
    """Class → the group that is the best for it, as far as that has been asked for."""
    groups: Sequence[Group] = ()
    """What tells which it is."""
    runs: dict[int, list[int]] | None = None
    """Class → places in the reading, where the best is not out of one group."""

    def first(self, row: int) -> int:
        """The group of devices, out of those with the same score the first, that is the best for a class."""
        if row not in self.firsts:
            changes = [group.change.item(row) for group in self.groups]
            self.firsts[row] = changes.index(max(changes))
        return self.firsts[row]


class Board:
    """Scores of demand classes on the sites of one cluster under one policy.

    Everything in it follows from the cluster, the mix and the views, so it is only a memory: two boards give the same
    answers. ``ahead`` and ``memory`` are those of the fit rule.
    """

    def __init__(self, cluster: Cluster, policy: Policy, mix: Mix, ahead: int = 0, *, memory: bool = True) -> None:
        self.cluster = cluster
        self.policy = policy
        self.mix = mix
        self.ahead = ahead
        self.memory = memory
        self._changed = cluster.watch()
        self._views: dict[str, Site] = {}
        self._rows: dict[tuple[Demand, str], int] = {}
        self._classes: list[tuple[Demand, str]] = []
        self._era = 0
        self._log: list[int] = []
        """Places of the columns that were rewritten in this era, in order."""
        self._start()

    # -- asking ------------------------------------------------------------------------------------------------

    def row(self, demand: Demand, task: str) -> int:
        """The row of a class; a new class is scored everywhere first."""
        known = self._rows.get((demand, task))
        if known is not None:
            return known
        key = (replace(demand, ram_mib=0), task)
        row = self._rows.get(key)
        if row is None:
            self.refresh()
            row = self._add(key)
        self._rows[demand, task] = row
        return row

    def refresh(self) -> None:
        """Take over what has changed in the cluster, in the views, and in the mix if it has drifted."""
        cluster = self.cluster
        if (
            self._names is not cluster.order()
            or self._known != len(cluster.tasksets)
            or (self.mix.version >= self._mix_version + LOOK_EVERY and self._drifted())
        ):
            self._start()
        if len(self._log) > LOGGED:
            self._forget()
        while self._changed:
            name, bits = self._changed.popitem()
            place = self._places.get(name)
            if place is not None:
                site = self._views.get(name) or cluster[name]
                if site is not self._sites[place] and not self._read(place, site, bits):
                    self._start()

    def veil(self, name: str, view: Site | None) -> None:
        """Let the board see another site than the cluster's at this node; None lifts the veil."""
        if view is None:
            self._views.pop(name, None)
        else:
            self._views[name] = view
        self._changed[name] = EVERYTHING

    def moment(self) -> tuple[int, int]:
        """How far the board has come; for `room_since`."""
        return self._era, len(self._log)

    def room_since(self, moment: tuple[int, int]) -> Ints | None:
        """[K] the most free host RAM (MiB) at a site that has changed since and takes the class; -1 where none does.

        A class that fitted nowhere at that moment fits somewhere now exactly if this is at least what it needs. None
        if too much has changed to tell.
        """
        era, number = moment
        if era != self._era:
            return None
        changed = list(dict.fromkeys(self._log[number:]))
        if not changed:
            return np.full(len(self._classes), -1)
        columns, ram_mib = self._scores[: len(self._classes)].T[changed], np.maximum(self._ram[changed], 0)
        most: Ints = np.where(columns >= NONE, ram_mib[:, None], -1).max(axis=0)
        return most

    def best(self, row: int, ram_mib: int = 0) -> Spot | None:
        """The best place for the class as things stood at the last `refresh`; None if it fits nowhere."""
        if not self._names:
            return None
        line, tries = self._lines[row], 0
        place = int(line.argmax())
        score = line.item(place)
        while score >= NONE and ram_mib and ram_mib > self._ram.item(place):
            line = line if tries else line.copy()
            line[place if tries < TRIES else self._ram < ram_mib] = NOWHERE
            tries += 1
            place = int(line.argmax())
            score = line.item(place)
        if score < NONE:
            return None
        column = self._columns[place]
        if row >= len(column.scores):
            self._read(place, self._site(self._names[place]))
            column = self._columns[place]
        found, gpus = self._readings[place].found, self._gpus[row]
        if column.runs is not None and row in column.runs:
            return Spot(self._names[place], tuple(sorted([found[at] & POSITION for at in column.runs[row]])), score)
        if not gpus:
            return Spot(self._names[place], (), score)
        first = column.firsts.get(row)
        start = column.starts[column.first(row) if first is None else first]
        if gpus == 1:
            return Spot(self._names[place], (found[start] & POSITION,), score)
        return Spot(self._names[place], tuple(sorted([mark & POSITION for mark in found[start : start + gpus]])), score)

    def best_at(self, row: int, site: Site) -> Spot | None:
        """The best place for the class at one site, be it as it is, veiled or imagined; memory and executors alone."""
        trial, reading = self.trial(row, site)
        scores, first = trial.best(self.policy.rate(trial))
        if scores[0] < NONE:
            return None
        positions = sorted(reading.found[at] & POSITION for at in trial.places(0, int(first[0])))
        return Spot(site.name, tuple(positions), int(scores[0]))

    def trial(self, row: int, site: Site) -> tuple[Trial, Reading]:
        """All candidates of the class at one site, be it as it is, veiled or imagined; memory and executors alone."""
        reading = Reading.of(site, self.ahead, self._least_mib, memory=self.memory)
        classes = self._tabulate([row])
        runs = classes.most_gpus > 1
        rooms = Rooms([site], [reading], [self._forms[site.shape]], self.outlook.step_mib, apart=runs)
        return Trial(classes, rooms, self.outlook, runs=runs), reading

    def learn(self, classes: Iterable[tuple[Demand, str]]) -> None:
        """Take in many classes at once; rows from before are void."""
        self._classes += {(replace(demand, ram_mib=0), task): None for demand, task in classes}
        self._rows = {key: row for row, key in enumerate(self._classes)}
        self._start()

    # -- keeping up --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin anew with the sites that there are now."""
        self._names = self.cluster.order()
        self._places = {name: place for place, name in enumerate(self._names)}
        self._known = len(self.cluster.tasksets)
        shares = self.mix.shares() if self.mix else []
        self.outlook, self._forms = look(map(self._site, self._names), shares)
        self._shares = dict(shares)
        self._mix_version = self.mix.version
        number = len(self._names)
        self._sites: list[Site | None] = [None] * number
        """As they were read last."""
        self._readings: list[Reading] = [Reading((), (), 0)] * number
        self._columns: list[_Column] = [_Column(np.zeros(0, np.int32), [])] * number
        self._shape: list[tuple[Shape | None, Form]] = [(None, Form((), 0, (0,)))] * number
        self._memory: dict[tuple[object, ...], _Column] = {}
        self._rooms: dict[bool, Rooms] = {}
        self._ram = np.zeros(number, dtype=np.int64)
        rows = 1 << max(4, len(self._classes).bit_length())
        self._scores = np.full((rows, number), NOWHERE, dtype=np.int32)
        self._lines = list(self._scores)
        self._group()
        self._changed.clear()
        for place, name in enumerate(self._names):
            self._read(place, self._site(name))
        self._forget()

    def _forget(self) -> None:
        """Begin a new era."""
        self._era += 1
        self._log.clear()

    def _site(self, name: str) -> Site:
        return self._views.get(name) or self.cluster[name]

    def _drifted(self) -> bool:
        """Whether the mix is no longer the one that the scores rest on."""
        self._mix_version = self.mix.version
        now = dict(self.mix.shares())
        moved = sum(abs(share - self._shares.get(demand, 0.0)) for demand, share in now.items())
        moved += sum(share for demand, share in self._shares.items() if demand not in now)
        return moved / 2 > DRIFT

    def _read(self, place: int, site: Site, changed: int = EVERYTHING) -> bool:
        """Bring one site's column up to date; False if the site's shape has not been seen before."""
        self._sites[place] = site
        known, form = self._shape[place]
        if site.shape is not known:
            found = self._forms.get(site.shape)
            if found is None:
                return False
            form = found
            self._shape[place] = site.shape, found
        reading = self._readings[place].again(site, changed, self.ahead, self._least_mib, self.memory)
        self._readings[place] = reading
        self._rooms.clear()
        self._ram[place] = site.node.ram_mib - site.node.ram_used_mib if site.node.ram_mib > 0 else _UNBOUND
        key: tuple[object, ...] = (form.sort, reading.cpu // CPU_GRAIN, *reading.codes)
        if len(form.present) > 1:
            key = (*key, tuple([form.kinds[mark & POSITION] for mark in reading.found]))
        if self.policy.whole_site:
            key = (*key, tuple([(device.busy, device.available_mib) for device in site.devices]))
        column = self._memory.get(key)
        if column is None or len(column.scores) < len(self._classes):
            column = self._compute(site, reading, form)
            if len(self._memory) >= REMEMBERED:
                self._memory.clear()
            self._memory[key] = column
        self._columns[place] = column
        scores = column.scores
        into = self._scores[: len(scores), place]
        if reading.cpu < self._most_cpu:
            np.minimum(scores, self._within(reading.cpu), out=into)
        else:
            into[:] = scores
        self._log.append(place)
        return True

    def _within(self, cpu: int) -> Scores:
        """[K] bounds of the scores at a site with so much free CPU: `NOWHERE` for classes that need more."""
        number = bisect_right(self._cpus, cpu)
        if number not in self._caps:
            self._caps[number] = np.where(self._cpu <= cpu, np.iinfo(np.int32).max, NOWHERE).astype(np.int32)
        return self._caps[number]

    def _compute(self, site: Site, reading: Reading, form: Form) -> _Column:
        """The scores of all classes at one site, whatever CPU they need."""
        step_mib, codes = self.outlook.step_mib, reading.codes
        if self._parts is not None and self._parts.able(reading):
            scores, groups, starts = self._parts.column(reading, form)
            column = _Column(scores, starts, groups=groups)
        else:
            rooms = Rooms([site], [reading], [form], step_mib)
            trial = Trial(self._all, rooms, self.outlook)
            scores, firsts = trial.best(self.policy.rate(trial))
            column = _Column(scores, rooms.starts[0], dict(enumerate(firsts.tolist())))
        several = self._several if len(column.starts) > 1 and codes[-1] >= self._several_mib * 4 else ()
        for classes, rows, least_mib in several:
            first = bisect_left(codes, least_mib * 4)
            if len(codes) - first < classes.most_gpus or (codes[first] == codes[-1] and len(form.present) == 1):
                continue
            trial = Trial(classes, Rooms([site], [reading], [form], step_mib, apart=True), self.outlook, runs=True)
            scores, firsts = trial.best(self.policy.rate(trial))
            column.scores[rows] = scores
            column.runs = column.runs or {}
            for cell, row in enumerate(rows.tolist()):
                column.runs[row] = trial.places(cell, int(firsts[cell]))
        return column

    # -- classes -----------------------------------------------------------------------------------------------

    def _add(self, key: tuple[Demand, str]) -> int:
        """Score a new class everywhere."""
        row = len(self._classes)
        self._classes.append(key)
        self._rows[key] = row
        if key[0].gpus and key[0].vram_mib < self._least_mib:
            self._start()
            return row
        self._group()
        if row == len(self._scores):
            self._scores = np.concatenate([self._scores, np.full_like(self._scores, NOWHERE)])
            self._lines = list(self._scores)
        if self._names:
            runs = key[0].gpus > 1
            trial = Trial(self._tabulate([row]), self._everywhere(apart=runs), self.outlook, runs=runs)
            scores, _ = trial.best(self.policy.rate(trial))
            cpu = np.array([reading.cpu for reading in self._readings])
            self._scores[row] = np.where(self._cpu[row] <= cpu, scores, NOWHERE)
        return row

    def _everywhere(self, *, apart: bool) -> Rooms:
        """The rooms of all sites as they were read last."""
        if apart not in self._rooms:
            sites = [self._site(name) for name in self._names]
            forms = [self._forms[site.shape] for site in sites]
            self._rooms[apart] = Rooms(sites, self._readings, forms, self.outlook.step_mib, apart=apart)
        return self._rooms[apart]

    def _group(self) -> None:
        """Tabulate the classes by the number of GPUs."""
        demands = [demand for demand, _ in self._classes]
        self._gpus = [demand.gpus for demand in demands]
        self._cpu = np.array([milli(demand.cpus) for demand in demands], dtype=np.int64)
        self._most_cpu = int(self._cpu.max(initial=0))
        self._least_mib = min([1, *[demand.vram_mib for demand in demands if demand.gpus]])
        self._all = self._tabulate(range(len(demands)))
        worth = self.policy.worth(self.outlook)
        self._parts = Columns(self._all, self.outlook, worth) if worth is not None else None
        self._cpus = sorted(self._cpu.tolist())
        self._caps: dict[int, Scores] = {}
        """By how many classes need no more CPU."""
        by_gpus: dict[int, list[int]] = {}
        for row, demand in enumerate(demands):
            if demand.gpus > 1:
                by_gpus.setdefault(demand.gpus, []).append(row)
        self._several: list[tuple[Classes, Ints, int]] = [
            (self._tabulate(rows), np.array(rows), min(demands[row].vram_mib for row in rows))
            for rows in by_gpus.values()
        ]
        self._several_mib = min((least_mib for _, _, least_mib in self._several), default=0)

    def _tabulate(self, rows: Iterable[int]) -> Classes:
        classes = [self._classes[row] for row in rows]
        tasksets, kinds = self.cluster.tasksets, self.outlook.kinds
        suits = np.zeros((len(classes), len(kinds)), dtype=bool)
        for at, (demand, task) in enumerate(classes):
            digests = {digest for digest, names in tasksets.items() if task in names}
            suits[at] = [kind.tasks in digests and kind.suits(demand) for kind in kinds]
        return Classes([demand for demand, _ in classes], suits, self.outlook)


_UNBOUND = int(np.iinfo(np.int64).max)
