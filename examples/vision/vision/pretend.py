"""A pretended model: takes memory on a simulated device, and time."""

from __future__ import annotations

import random
import time
from typing import Any

from brim.gpu import simulated

CONTEXT_MIB = 160
"""What a process's first use of a simulated device takes, as CUDA does; the table declares up to 400 MiB."""
STEPS = 4


def hold_model(*, weights_mib: int) -> Any:
    """Load the weights and keep them, as a model executor does; None where there is no simulated device."""
    return simulated.allocate(weights_mib, context_mib=CONTEXT_MIB) if simulated.visible() else None


def run_model(request: Any, *, weights_mib: int, seconds: float) -> None:
    """Load the weights, let the working set grow to its peak, compute, and free it all.

    The peak is not what the table's formula says: it is drawn evenly from the upper half of what the table lets
    the task have. The time varies by a quarter around ``seconds``. Both draws depend on the task's id alone.
    """
    draw = random.Random(request.id)
    duration_s = seconds * draw.uniform(0.75, 1.25)
    granted = getattr(request, "brim", None) or {}
    limit_mib = granted.get("vram_mib", weights_mib + CONTEXT_MIB) - CONTEXT_MIB
    peak_mib = max(weights_mib, round(limit_mib * draw.uniform(0.5, 1.0)))
    if not simulated.visible():
        time.sleep(duration_s)
        return
    with simulated.allocate(weights_mib, context_mib=CONTEXT_MIB) as memory:
        for step in range(1, STEPS + 1):
            memory.resize(weights_mib + (peak_mib - weights_mib) * step // STEPS)
            time.sleep(duration_s / STEPS)
