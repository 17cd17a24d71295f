"""The score board: for every demand class and every site the best score, kept up to date change by change.

A decision costs about the change since the last one: a change at a site rewrites that site's column, usually from
memory, and a decision is one search along the class's row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from brim.core.model import Demand
from brim.core.placement.cluster import Cluster, Shape, Site
from brim.core.placement.fit import milli
from brim.core.placement.mix import Mix
from brim.core.placement.outlook import Bools, Form, Ints, look
from brim.core.placement.policy import Policy
from brim.core.placement.rooms import CPU_GRAIN, Classes, Reading, Rooms
from brim.core.placement.trial import NONE, NOWHERE, Scores, Trial

REMEMBERED = 20_000
"""Columns kept by what is free at a site; when there are more, all are forgotten."""

LOGGED = 100_000
"""Rewritten columns that are remembered for classes that wait; when there are more, all classes are tried again."""

LOOK_EVERY = 100
"""After so many observations the mix is compared with the one that the scores rest on."""

DRIFT = 0.05
"""They are computed anew once so much of the mix (total variation) has moved."""


@dataclass(frozen=True, slots=True)
class Spot:
    """The best place for a class: devices (by position) of a node, and its score."""

    node: str
    positions: tuple[int, ...]
    score: int


@dataclass(slots=True)
class _Column:
    """What classes score at a site, and which of its groups of devices is the best for each."""

    scores: Scores
    firsts: Ints
    starts: list[int]
    """Where the groups begin in the reading."""
    runs: dict[int, list[int]] | None = None
    """Class → places in the reading, where the best is not out of one group."""


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
        self._recent: dict[int, tuple[list[int], list[bool]]] = {}
        """Entries of the log from a number on, each once, and which classes fit at one of them."""
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
        if self._names is not self.cluster.order() or self._known != len(self.cluster.tasksets) or self._drifted():
            self._start()
        if len(self._log) > LOGGED:
            self._forget()
        while self._changed:
            name = self._changed.pop()
            if name in self._places and not self._read(name):
                self._start()

    def veil(self, name: str, view: Site | None) -> None:
        """Let the board see another site than the cluster's at this node; None lifts the veil."""
        if view is None:
            self._views.pop(name, None)
        else:
            self._views[name] = view
        self._changed.add(name)

    def moment(self) -> tuple[int, int]:
        """How far the board has come; for `woken`."""
        return self._era, len(self._log)

    def woken(self, row: int, ram_mib: int, since: tuple[int, int]) -> bool:
        """Whether a class that fitted nowhere at an earlier moment may fit since; False is certain."""
        era, number = since
        if era != self._era:
            return True
        if number == len(self._log):
            return False
        if number not in self._recent:
            changed = list(dict.fromkeys(self._log[number:]))
            somewhere: Bools = np.logical_or.reduce(self._scores[:, changed] >= NONE, axis=1)
            self._recent[number] = changed, somewhere.tolist()
        places, fits = self._recent[number]
        if not fits[row] or not ram_mib:
            return fits[row]
        return any([self._scores[row, place] >= NONE and ram_mib <= self._ram[place] for place in places])

    def best(self, row: int, ram_mib: int = 0) -> Spot | None:
        """The best place for the class as things stood at the last `refresh`; None if it fits nowhere."""
        if not self._names:
            return None
        line = self._scores[row]
        place = int(line.argmax())
        if line[place] < NONE:
            return None
        if ram_mib and ram_mib > self._ram[place]:
            line = np.where(self._ram >= ram_mib, line, NOWHERE)
            place = int(line.argmax())
            if line[place] < NONE:
                return None
        column = self._columns[place]
        if row >= len(column.scores):
            self._read(self._names[place])
            column = self._columns[place]
        order, gpus = self._readings[place].order, self._classes[row][0].gpus
        if column.runs is not None and row in column.runs:
            positions = sorted([order[at] for at in column.runs[row]])
        elif gpus == 1:
            positions = [order[column.starts[column.firsts[row]]]]
        else:
            start = column.starts[column.firsts[row]] if gpus else 0
            positions = sorted(order[start : start + gpus])
        return Spot(self._names[place], tuple(positions), int(line[place]))

    def best_at(self, row: int, site: Site) -> Spot | None:
        """The best place for the class at one site, be it as it is, veiled or imagined; memory and executors alone."""
        trial, reading = self.trial(row, site)
        scores, first = trial.best(self.policy.rate(trial))
        if scores[0] < NONE:
            return None
        positions = sorted(reading.order[at] for at in trial.places(0, int(first[0])))
        return Spot(site.name, tuple(positions), int(scores[0]))

    def trial(self, row: int, site: Site) -> tuple[Trial, Reading]:
        """All candidates of the class at one site, be it as it is, veiled or imagined; memory and executors alone."""
        reading = Reading.of(site, self.ahead, self._least_mib, memory=self.memory)
        classes = self._tabulate([row])
        runs = classes.most_gpus > 1
        rooms = Rooms([site], [reading], [self._forms[site.shape]], self.outlook.step_mib, apart=runs)
        return Trial(classes, rooms, self.outlook, runs=runs), reading

    def learn(self, classes: Iterable[tuple[Demand, str]]) -> None:
        """Take in many classes at once."""
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
        self._readings: list[Reading] = [Reading([], [], 0)] * number
        self._columns: list[_Column] = [_Column(np.zeros(0, np.int32), np.zeros(0, np.int64), [])] * number
        self._shape: list[tuple[Shape | None, Form]] = [(None, Form((), 0, (0,)))] * number
        self._memory: dict[tuple[object, ...], _Column] = {}
        self._rooms: dict[bool, Rooms] = {}
        self._ram = np.zeros(number, dtype=np.int64)
        rows = 1 << max(4, len(self._classes).bit_length())
        self._scores = np.full((rows, number), NOWHERE, dtype=np.int32)
        self._group()
        self._changed.clear()
        for name in self._names:
            self._read(name)
        self._forget()

    def _forget(self) -> None:
        """Begin a new era."""
        self._era += 1
        self._log.clear()
        self._recent.clear()

    def _site(self, name: str) -> Site:
        return self._views.get(name) or self.cluster[name]

    def _drifted(self) -> bool:
        if self.mix.version < self._mix_version + LOOK_EVERY:
            return False
        self._mix_version = self.mix.version
        now = dict(self.mix.shares())
        moved = sum(abs(share - self._shares.get(demand, 0.0)) for demand, share in now.items())
        moved += sum(share for demand, share in self._shares.items() if demand not in now)
        return moved / 2 > DRIFT

    def _read(self, name: str) -> bool:
        """Bring one site's column up to date; False if the site's shape has not been seen before."""
        site = self._views.get(name) or self.cluster[name]
        place = self._places[name]
        known, form = self._shape[place]
        if site.shape is not known:
            found = self._forms.get(site.shape)
            if found is None:
                return False
            form = found
            self._shape[place] = site.shape, found
        reading = Reading.of(site, self.ahead, self._least_mib, memory=self.memory)
        self._readings[place] = reading
        self._rooms.clear()
        self._ram[place] = site.node.ram_mib - site.node.ram_used_mib if site.node.ram_mib > 0 else _UNBOUND
        key: tuple[object, ...] = (form.sort, reading.cpu // CPU_GRAIN, *reading.codes)
        if self.policy.whole_site:
            key = (*key, tuple([(device.busy, device.available_mib) for device in site.devices]))
        column = self._memory.get(key)
        if column is None or len(column.scores) < len(self._classes):
            column = self._compute(site, reading, form)
            if len(self._memory) >= REMEMBERED:
                self._memory.clear()
            self._memory[key] = column
        self._columns[place] = column
        rows = len(column.scores)
        scores = column.scores
        if reading.cpu < self._most_cpu:
            scores = np.where(self._cpu <= reading.cpu, scores, NOWHERE)
        self._scores[:rows, place] = scores
        self._log.append(place)
        self._recent.clear()
        return True

    def _compute(self, site: Site, reading: Reading, form: Form) -> _Column:
        """The scores of all classes at one site, whatever CPU they need."""
        step_mib, codes = self.outlook.step_mib, reading.codes
        rooms = Rooms([site], [reading], [form], step_mib)
        trial = Trial(self._all, rooms, self.outlook)
        column = _Column(*trial.best(self.policy.rate(trial)), rooms.starts[0])
        for classes, rows, least_mib in self._several if len(rooms.starts[0]) > 1 else ():
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
        self._cpu = np.array([milli(demand.cpus) for demand in demands], dtype=np.int64)
        self._most_cpu = int(self._cpu.max(initial=0))
        self._least_mib = min([1, *[demand.vram_mib for demand in demands if demand.gpus]])
        self._all = self._tabulate(range(len(demands)))
        by_gpus: dict[int, list[int]] = {}
        for row, demand in enumerate(demands):
            if demand.gpus > 1:
                by_gpus.setdefault(demand.gpus, []).append(row)
        self._several: list[tuple[Classes, Ints, int]] = [
            (self._tabulate(rows), np.array(rows), min(demands[row].vram_mib for row in rows))
            for rows in by_gpus.values()
        ]

    def _tabulate(self, rows: Iterable[int]) -> Classes:
        classes = [self._classes[row] for row in rows]
        tasksets, kinds = self.cluster.tasksets, self.outlook.kinds
        suits = np.zeros((len(classes), len(kinds)), dtype=bool)
        for at, (demand, task) in enumerate(classes):
            digests = {digest for digest, names in tasksets.items() if task in names}
            suits[at] = [kind.tasks in digests and kind.suits(demand) for kind in kinds]
        return Classes([demand for demand, _ in classes], suits, self.outlook)


_UNBOUND = int(np.iinfo(np.int64).max)
