"""Every way to put demand classes on sites, tried at once: what the placement scores are computed from."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from brim.core.placement.outlook import Bools, Floats, Ints, Outlook, Usable
from brim.core.placement.rooms import Classes, Rooms

NOWHERE = int(np.iinfo(np.int32).min)
"""The score of a cell without any candidate."""

Scores = NDArray[np.int32]
Number = TypeVar("Number", bound=np.generic)


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
        """Free steps that a further task could use there."""
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
        left: Ints = np.maximum(self.before - self.of_cells(classes.steps), 0)
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

    def fill_lost(self) -> Floats:
        """Fall of the devices' expected fill (`Outlook.fill`)."""
        fill = self.outlook.fill
        return self.total(fill[self.before] - fill[self.after])

    def stranded_saved(self) -> Floats:
        """Fall of the free GPU memory that the server's free CPU cannot feed at the mean ratio."""
        if not self.outlook.cpu_per_step:
            return np.zeros((1, 1))
        free = self.rooms.site_free[:, None]
        before = np.maximum(free - self.fed.feeds_now, 0.0)
        return before - np.maximum(free - self.fed.feeds - self.claimed, 0.0)

    def usable_lost(self, usable: Usable) -> Floats:
        """Fall of the site's usable memory."""
        rooms = self.rooms
        level = self.fed.level
        now = np.add.reduce(usable.of(rooms.kind, self.fed.level_now, rooms.free) * rooms.count, axis=1)
        each = usable.of(rooms.kind, level, rooms.free)
        kept = np.add.reduce(each * rooms.count, axis=1)
        if self._places is None:
            change = self.total(usable.of(rooms.kind, level, self.after) - each)
        else:
            kind = rooms.kind if isinstance(rooms.kind, int) else self.of_devices(rooms.kind)
            own = level[:, None]
            change = self.total(usable.of(kind, own, self.after) - usable.of(kind, own, self.before))
        lost: Floats = (now - kept)[:, None] - change
        for need, weight in usable.several:
            if need <= rooms.most:
                lost = lost + self._several_lost(need, weight, rooms.free)
        return lost

    def _several_lost(self, need: int, weight: Floats, free: Ints) -> Floats:
        """The part of `usable_lost` due to likely demands for several GPUs with this much on each."""
        rooms, level, level_now = self.rooms, self.fed.level, self.fed.level_now
        held = self.before >= need
        drops = held & (self.after < need)
        lost: Floats = np.zeros((1, 1))
        for kind in rooms.kinds:
            here, of_kind = (free >= need) * rooms.count, None
            if not isinstance(rooms.kind, int):
                here, of_kind = here * (rooms.kind == kind), self.of_devices(rooms.kind == kind)
            count = np.add.reduce(here, axis=1)[:, None]
            room = np.add.reduce(here * free, axis=1)[:, None]
            gone = drops.astype(np.float64)
            taken = np.where(drops, self.before, held * (self.before - self.after))
            if of_kind is not None:
                gone, taken = gone * of_kind, taken * of_kind
            gone = np.minimum(self.total(gone), count).astype(np.int64)
            then = weight[kind, level, count - gone] * (room - self.total(taken))
            lost = lost + (weight[kind, level_now, count] * room - then)
        return lost

    # -- choosing ----------------------------------------------------------------------------------------------

    def best(self, score: Floats | float) -> tuple[Scores, Ints]:
        """Each cell's highest score, rounded down, and its first candidate with it."""
        ranked = np.where(self.fits, score, float(NOWHERE))
        first = ranked.argmax(axis=1)
        cells = self.classes.cells if len(self.rooms) == 1 else np.arange(len(ranked))
        return np.floor(ranked[cells, first]).astype(np.int32), first

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
