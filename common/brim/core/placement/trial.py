"""Every way to put demand classes on sites, tried at once: what the placement scores are computed from."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from brim.core.placement.outlook import Bools, Floats, Ints, Outlook, Worth
from brim.core.placement.rooms import Classes, Rooms

NOWHERE = -1_000_000_000
"""About the score of a cell without any candidate; no real score comes near it."""

NONE = NOWHERE // 2
"""Scores below are of cells without any candidate."""

Scores = NDArray[np.int32]
Number = TypeVar("Number", bound=np.generic)


class Rated(NamedTuple):
    """Scores of candidates [C, W], given as the sum of a part for each candidate and one for its cell [C]."""

    candidates: Floats | float
    cells: Floats | float = 0.0

    def whole(self) -> Floats:
        """[C, W], or of length 1 where nothing differs."""
        cells = np.asarray(self.cells)
        summed: Floats = np.asarray(self.candidates) + (cells[:, None] if cells.ndim else cells)
        return summed


class Trial:
    """K classes on one site, or one class on S sites: C = K or S *cells*, with W *candidates* each.

    A candidate is a set of devices that could take the class: as many as the demand asks for out of one group of the
    rooms. With ``runs`` the classes are all for the same number of GPUs, several, the rooms keep devices apart, and
    candidates are runs of neighbours in free memory among the fitting devices. Arrays are [C, W], or have length 1
    where they do not depend on cell or candidate; ``fits`` says which candidates are real. Memory is in the outlook's
    steps unless a name says otherwise.
    """

    def __init__(self, classes: Classes, rooms: Rooms, outlook: Outlook, *, runs: bool = False) -> None:
        self.classes = classes
        self.rooms = rooms
        self.outlook = outlook
        self._places: Ints | None = None
        self.fits = self._device_fits()
        if runs:
            self._places, self.fits = _runs(self.fits, classes.most_gpus)
        elif classes.most_gpus > 1:
            self.fits &= rooms.count >= classes.gpus[:, None]
        self.before: Ints = self.of_devices(rooms.free)
        """Free steps of each candidate's devices."""
        self.after = self._after()
        """Free steps that a further task could use there; below 0 where the class does not fit."""
        self.claimed = self._claimed()
        """Steps that the task holds, all devices together."""
        self.fed = classes.fed(rooms.cpu)

    def _device_fits(self) -> Bools:
        """[C, G]: the fit rule, device by device."""
        classes, rooms = self.classes, self.rooms
        fits: Bools = rooms.room >= classes.need[:, None]
        if classes.whole is not None:
            fits &= ~classes.whole[:, None] | rooms.empty
        if not classes.all_suit:
            fits &= classes.suits[np.arange(len(classes))[:, None], rooms.kind]
        return fits

    def _after(self) -> Ints:
        classes, rooms = self.classes, self.rooms
        left: Ints = self.before - self.of_cells(classes.steps)
        if classes.whole is not None:
            left = np.where(self.of_cells(classes.whole), 0, left)
        if rooms.last is not None:
            left = np.where(self.of_devices(rooms.last) & (self.of_cells(classes.gpus) > 0), 0, left)
        return left

    def _claimed(self) -> Floats:
        fixed = self.classes.claimed[:, None]
        if self.classes.whole is None:
            return fixed
        return np.where(self.classes.whole[:, None], self.total(self.before.astype(np.float64)), fixed)

    def of_devices(self, values: NDArray[Number]) -> NDArray[Number]:
        """Something about devices [S, G] for each candidate; with runs, the third dimension is its devices."""
        return values if self._places is None else values[np.arange(len(values))[:, None, None], self._places]

    def of_cells(self, values: NDArray[Number]) -> NDArray[Number]:
        """Something about cells [C], to be combined with what `of_devices` returns."""
        return values[:, None] if self._places is None else values[:, None, None]

    def total(self, effect: Floats) -> Floats:
        """What happens to all devices of each candidate together, from what happens to one."""
        if self._places is not None:
            summed: Floats = effect.sum(axis=2)
            return summed
        return effect if self.classes.times is None else effect * self.classes.times

    # -- what changes ------------------------------------------------------------------------------------------

    def kept(self, worth: Worth) -> Rated:
        """How much of a site's worth candidates keep: worth after − before, with what the task itself holds."""
        rooms, fed, classes = self.rooms, self.fed, self.classes
        each = worth.of(rooms.kind, fed.row, rooms.free)
        if self._places is None:
            change = self.total(worth.of(rooms.kind, fed.row, self.after) - each)
        else:
            kind = rooms.kind if isinstance(rooms.kind, int) else self.of_devices(rooms.kind)
            own = fed.row[:, None]
            change = self.total(worth.of(kind, own, self.after) - worth.of(kind, own, self.before))
        now = worth.of(rooms.kind, fed.row_now, rooms.free)
        cells = rooms.over_groups(each) - rooms.over_groups(now)
        claims = worth.claims if worth.price is None else worth.claims - worth.price[rooms.sort]
        if classes.whole is None:
            cells = cells + claims * classes.claimed
        else:
            change = change + np.asarray(claims)[..., None] * self.claimed
        if worth.unstranded:
            before = np.maximum(rooms.site_free - fed.feeds_now, 0.0)
            if classes.whole is None:
                after = np.maximum(rooms.site_free - fed.enough, 0.0)
                cells = cells + worth.unstranded * (before - after)
            else:
                over = np.maximum((rooms.site_free - fed.feeds)[:, None] - self.claimed, 0.0)
                change = change + worth.unstranded * (before[:, None] - over)
        for need, weight in worth.several:
            if need <= rooms.most:
                change = change - self._several_lost(need, weight, rooms.free)
        return Rated(change, cells)

    def _several_lost(self, need: int, weight: Floats, free: Ints) -> Floats:
        """Fall of what is usable for likely demands for several GPUs with this much on each."""
        rooms, fed = self.rooms, self.fed
        lost = np.zeros((len(fed.left), self.fits.shape[1]))
        for kind in rooms.kinds:
            here = (free >= need) * rooms.count
            if not isinstance(rooms.kind, int):
                here = here * (rooms.kind == kind)
            count, room, table = np.add.reduce(here, axis=1), np.add.reduce(here * free, axis=1), weight[kind]
            same = table[fed.level, count] * room
            lost += (table[fed.level_now, count] * room - same)[:, None]
            if self._places is not None:
                held = self.before >= need
                if not isinstance(rooms.kind, int):
                    held = held & (self.of_devices(rooms.kind) == kind)
                drops = held & (self.after < need)
                gone = np.add.reduce(drops, axis=2, dtype=np.int64)
                left = room[:, None] - np.add.reduce(held * self.before - (held & ~drops) * self.after, axis=2)
                lost += same[:, None] - table[fed.level[:, None], np.maximum(count[:, None] - gone, 0)] * left
                continue
            # Only candidates out of a group that has enough change what there is for several GPUs.
            for group in np.flatnonzero(here.any(axis=0)).tolist():
                before, after, has = self.before[:, group], self.after[:, group], here[:, group] > 0
                stays = after >= need
                gone = self.classes.gpus * (has & ~stays)
                left = room - self.classes.gpus * has * (before - stays * after)
                lost[:, group] += same - table[fed.level, np.maximum(count - gone, 0)] * left
        return lost

    # -- choosing ----------------------------------------------------------------------------------------------

    def best(self, rated: Rated) -> tuple[Scores, Ints]:
        """Each cell's highest score, rounded down, and its first candidate with it."""
        ranked = np.where(self.fits, rated.candidates, NOWHERE)
        first = ranked.argmax(axis=1)
        cells = self.classes.cells if len(self.rooms) == 1 else np.arange(len(ranked))
        return np.floor(ranked[cells, first] + rated.cells).astype(np.int32), first

    def places(self, cell: int, candidate: int) -> list[int]:
        """The devices of one candidate, as places in the site's reading."""
        if self._places is not None:
            return sorted(self._places[cell, candidate].tolist())
        start = self.rooms.starts[cell if len(self.rooms) > 1 else 0][candidate : candidate + 1]
        gpus = int(self.classes.gpus[cell if len(self.classes) > 1 else 0])
        return list(range(start[0], start[0] + gpus)) if gpus else []


def _runs(fits: Bools, width: int) -> tuple[Ints, Bools]:
    """Runs of ``width`` neighbours among each cell's fitting devices: [C, W, width] places, and which are real."""
    order = np.argsort(~fits, axis=1, kind="stable")
    runs = max(1, fits.shape[1] - width + 1)
    starts = np.arange(runs)[:, None] + np.arange(width)
    places = order[:, np.minimum(starts, fits.shape[1] - 1)]
    real = np.arange(runs) + width <= fits.sum(axis=1)[:, None]
    return places, real
