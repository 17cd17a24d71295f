"""How often to sample devices, and the peaks that samples show. Pure: samples in, seconds and MiB out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from brim.core.model import AttemptView
from brim.gpu.probe import DeviceFault, Sample

FAST_S = 0.1
"""Between two samples while memory moves, in seconds."""
REST_S = 1.0
"""Between two samples once memory has rested for a while, in seconds; no report is older than this."""

Samples = Mapping[str, Sample | DeviceFault]


def moved(before: Samples, after: Samples) -> bool:
    """Whether anything but a device's name has changed between two samples: memory, processes, health."""
    return before != after


def next_interval_s(interval_s: float, *, moving: bool) -> float:
    """Seconds to the next sample after one that came ``interval_s`` after its predecessor.

    ``moving``: memory has moved, or an attempt has just begun and is about to move it. At rest the interval
    doubles from ``FAST_S`` to ``REST_S``, so a short pause of a busy task is not yet rest.
    """
    return FAST_S if moving else min(2 * interval_s, REST_S)


class Peaks:
    """The most memory that samples have shown of live attempts, in MiB; of several devices the largest figure.

    A figure is the process's whole: with its context, and what its allocator kept from earlier attempts.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}

    def observe(self, attempts: Iterable[AttemptView], samples: Samples) -> list[tuple[AttemptView, int]]:
        """The attempts that are bound to a process and whose peak these samples raise, with the new peak.

        Attempts that are not named any more are forgotten; what samples do not know changes nothing.
        """
        bound = [attempt for attempt in attempts if attempt.proc]
        before, self._peaks = self._peaks, {}
        raised = []
        for attempt in bound:
            known, seen = before.get(attempt.attempt, 0), _seen_mib(attempt, samples)
            self._peaks[attempt.attempt] = max(known, seen)
            if seen > known:
                raised.append((attempt, seen))
        return raised


def _seen_mib(attempt: AttemptView, samples: Samples) -> int:
    """What samples show of an attempt's process; 0 where they do not know, or it uses nothing."""
    pid = int(attempt.proc.partition(".")[0])
    found = [samples.get(uuid) for uuid in attempt.devices]
    return max((sample.of(pid) or 0 for sample in found if isinstance(sample, Sample)), default=0)
