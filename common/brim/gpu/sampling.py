"""How often to sample devices, and the peaks that samples show. Pure: samples in, seconds and MiB out."""

from __future__ import annotations

from collections.abc import Mapping

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
    """The most memory that samples have shown of the processes under watch, per device, in MiB.

    A figure is the process's whole: with its context, and what its allocator kept from earlier attempts.
    """

    def __init__(self) -> None:
        self._peaks: dict[tuple[str, int], int | None] = {}

    def begin(self, uuid: str, pid: int) -> None:
        """Watches the process on the device from now on, from nothing known."""
        self._peaks[uuid, pid] = None

    def observe(self, samples: Samples) -> None:
        """Raises the peaks to what these samples show; what they do not know changes nothing."""
        for (uuid, pid), peak in self._peaks.items():
            sample = samples.get(uuid)
            mib = sample.of(pid) if isinstance(sample, Sample) else None
            if mib is not None:
                self._peaks[uuid, pid] = max(peak or 0, mib)

    def end(self, uuid: str, pid: int) -> int | None:
        """The peak, and the end of the watch. None when no sample showed the process using memory."""
        return self._peaks.pop((uuid, pid), None) or None
