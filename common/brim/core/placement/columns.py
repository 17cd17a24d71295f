"""A site's column put together from what is remembered of its groups of devices.

A site's worth (`Worth`) is a sum over its devices, but for what depends on the site as a whole. So what a class scores
at a site follows from what it would do to each group of devices, and few groups are new: sites that are not alike have
groups in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from brim.core.placement.outlook import STEPS, Floats, Form, Ints, Outlook, Worth
from brim.core.placement.rooms import CPU_GRAIN, Classes, Reading
from brim.core.placement.trial import NOWHERE, Scores

REMEMBERED = 5_000
"""Groups that are remembered; when there are more, all are forgotten."""

_SCORE = np.dtype(np.int32)


class Group(NamedTuple):
    """What K classes would do to a group of devices that are alike."""

    change: Floats
    """[K] what the worth of the group gains if the class is put there; about `NOWHERE` where it does not fit."""
    rest: Floats
    """[K] what it gains by the CPU alone that the class takes from the server, wherever there it is put."""
    free: int
    """Steps available on all of its devices."""


@dataclass(frozen=True, slots=True)
class _Host:
    """The CPU side of all classes at servers with so much free CPU."""

    rows: Ints
    """[2 K] where the worth's tables begin after the placement, and from there on the steps that a class takes less."""
    row_now: int
    """Where they begin before the placement."""
    fed: Floats
    """[K] what the steps of GPU memory are worth that could be free before the placement without being stranded
    afterwards."""
    least_fed: float
    """The least of these."""
    fed_now: float
    """What the steps are worth that could be free now without being stranded."""
    claims_fed: dict[int, Floats]
    """By sort of server, [K] what a class is worth by what it holds, and ``fed``."""


class Columns:
    """The scores of K classes at one site after another; equal to those of a `Trial`, but a fraction of the work."""

    def __init__(self, classes: Classes, outlook: Outlook, worth: Worth) -> None:
        self._classes = classes
        self._step_mib = outlook.step_mib
        self._worth = worth
        kinds = range(len(outlook.kinds))
        suited = [(outlook.suits[:, kind].tobytes(), classes.suits[:, kind].tobytes()) for kind in kinds]
        self._alike = [suited.index(each) for each in suited]
        """Of each kind, the first one that is alike in all that counts."""
        self._able = classes.whole is None
        """A class that holds all of a device holds what differs from group to group."""
        self._several = min((need for need, _ in worth.several), default=STEPS + 1)
        self._groups: dict[tuple[int, int, int, int], Group] = {}
        self._hosts: dict[int, _Host] = {}
        """By free CPU."""
        self._caps: dict[tuple[int, int, int], Floats] = {}
        price = np.zeros(len(outlook.sorts)) if worth.price is None else worth.price
        self._claims = (worth.claims - price)[:, None] * classes.claimed
        """[sort, K] what a class is worth by what it holds."""
        bare = classes.gpus == 0
        self._none = Group(np.where(bare, 0.0, float(NOWHERE)), np.zeros(len(classes)), 0)

    def able(self, reading: Reading) -> bool:
        """Whether the site's worth is such a sum: not while it could take likely demands for several GPUs."""
        codes = reading.codes
        return self._able and (not codes or (codes[-1] >> 2) // self._step_mib < self._several)

    def column(self, reading: Reading, form: Form) -> tuple[Scores, list[Group], list[int]]:
        """[K] scores at one site, whatever CPU the classes need; its groups, and where they begin in the reading."""
        kinds, cpu = form.kinds, reading.cpu // CPU_GRAIN * CPU_GRAIN
        host, known, alike = self._hosts.get(cpu) or self._host(cpu), self._groups, self._alike
        groups, starts, start = [], [], 0
        for code, kind, count in reading.groups(kinds if len(form.present) > 1 else None):
            key = cpu, code, alike[kinds[0] if kind is None else kind], count
            groups.append(known.get(key) or self._group(host, *key))
            starts.append(start)
            start += count
        first, *others = groups or [self._none]
        change, rest, free = first.change, first.rest, first.free
        for group in others:
            change, rest, free = np.maximum(change, group.change), rest + group.rest, free + group.free
        total = change + rest
        claims, free_worth = self._claims[form.sort], self._worth.unstranded * free
        if free_worth <= host.least_fed and free_worth <= host.fed_now:
            total += claims
        else:
            # What is stranded now, less what would be then.
            claims_fed = host.claims_fed.get(form.sort)
            if claims_fed is None:
                claims_fed = host.claims_fed[form.sort] = claims + host.fed
            if free_worth > host.fed_now:
                claims = claims + (free_worth - host.fed_now)
                free_worth = host.fed_now
            total += np.minimum(claims_fed - free_worth, claims)
        return np.floor(total, out=total).astype(_SCORE), groups, starts

    def _group(self, host: _Host, cpu: int, code: int, kind: int, count: int) -> Group:
        """A group of so many devices of this kind and code, on a server with so much free CPU."""
        classes, worth = self._classes, self._worth
        free, size = min((code >> 2) // self._step_mib, STEPS), len(classes)
        at = host.rows + free
        if code & 2:  # with the last executor, all that is left of the device's memory is of no use
            at[size:] = np.where(classes.gpus > 0, host.rows[:size], at[:size])
        worths = worth.at(kind, at)
        each = worths[:size]
        change = worths[size:] - each
        if count > 1 and classes.times is not None:
            change *= classes.gpus
        rest = each - worth.at(kind, host.row_now + free)
        if count > 1:
            rest *= count
        caps = self._caps.get((code >> 2, kind, count))
        np.minimum(change, self._cap(code >> 2, kind, count) if caps is None else caps, out=change)
        if len(self._groups) >= REMEMBERED:
            self._groups.clear()
        found = self._groups[cpu, code, kind, count] = Group(change, rest, free * count)
        return found

    def _cap(self, room_mib: int, kind: int, count: int) -> Floats:
        """[K] bounds: about `NOWHERE` for classes that do not fit so many devices of a kind with so much room."""
        classes = self._classes
        fits = classes.suits[:, kind] & (classes.gpus <= count) & (classes.need <= room_mib)
        if len(self._caps) >= REMEMBERED:
            self._caps.clear()
        found = self._caps[room_mib, kind, count] = np.where(fits, np.inf, float(NOWHERE))
        return found

    def _host(self, cpu: int) -> _Host:
        fed, weight = self._classes.fed(np.array([cpu])), self._worth.unstranded
        if len(self._hosts) >= REMEMBERED:
            self._hosts.clear()
        row, worth_fed = fed.row[:, 0], weight * fed.enough
        found = self._hosts[cpu] = _Host(
            np.concatenate([row, row - self._classes.steps]),
            int(fed.row_now[0, 0]),
            worth_fed,
            float(worth_fed.min(initial=np.inf)),
            weight * float(fed.feeds_now[0]),
            {},
        )
        return found
