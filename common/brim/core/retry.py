"""What a task asks for after it ran out of memory: no table knows everything."""

from __future__ import annotations

import math

from .profiles import size_class

GROWTH = 1.5
"""At least this factor on a demand that did not suffice."""


def demand_after_out_of_memory(vram_mib: int, peak_mib: int, offered_mib: int | None, largest_mib: int) -> int | None:
    """The MiB per device to place a task with that ran out of memory while ``vram_mib`` were reserved for it.

    ``peak_mib``: the most that its executor is known to have held, its context included; 0 if unknown.
    ``offered_mib``: what the executor and the free memory of its device came to when it was refused; None if unknown.
    If that is less than the reservation, somebody else has used what was the task's own: its demand stays. Else
    the task has outgrown it. ``largest_mib``: what the largest device can give; None if a task that has had as much
    wants more.
    """
    robbed = offered_mib is not None and offered_mib < vram_mib and peak_mib <= vram_mib
    if robbed:
        return vram_mib
    if vram_mib >= largest_mib:
        return None
    return min(size_class(max(math.ceil(vram_mib * GROWTH), peak_mib)), largest_mib)
