"""Short storms: brim holds, and the storm would tell if it did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults.storm import Storm, replay

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("seed", [7])
def test_brim_holds_in_a_storm(seed: int, tmp_path: Path) -> None:
    figures = Storm(tmp_path, 12.0, seed).run()

    assert figures.held, f"{figures}\nreplay: {replay(figures)}"
    assert figures.tasks > 10
    assert figures.kills > 0
    assert figures.items > 0
    assert figures.executors_started > 0


# One of brim's guards is off, and what shows it strikes: the storm's settings.
WITHOUT: dict[str, dict[str, Any]] = {
    # A node that was declared lost while it was paused finishes what has been given to another one.
    "fencing": {
        "seconds": 20.0,
        "seed": 1,
        "faults": {"pause_agent": 1},
        "outstanding": 4,
        "lease_s": 1.5,
        "pauses": (8.0, 8.0),
        "first_s": 1.5,
        "every_s": 60.0,
        "longest_s": 10.0,
        "latest_s": 10.0,
    },
    # What Celery puts back into the queue for a killed executor of several GPUs is admitted once more.
    "admission": {
        "seconds": 20.0,
        "seed": 2,
        "faults": {"busy_executor": 1},
        "mix": {"long_pair": 1},
        "outstanding": 2,
        "longest_s": 3.0,
        "latest_s": 10.0,
        "nodes": 1,
        "gpus": 2,
    },
    # The attempts of killed executors are never taken back.
    "reclaim": {
        "seconds": 2.0,
        "seed": 3,
        "faults": {"busy_executor": 1},
        "outstanding": 2,
        "longest_s": 2.0,
        "latest_s": 8.0,
        "nodes": 1,
    },
}


@pytest.mark.large
@pytest.mark.parametrize("guard", WITHOUT)
def test_without_a_guard_a_storm_tells(guard: str, tmp_path: Path) -> None:
    settings = {"mix": {"long": 1}, "intakes": 1, "placements": 1, **WITHOUT[guard]}

    figures = Storm(tmp_path, sabotage=guard, **settings).run()

    told = figures.lost if guard == "reclaim" else figures.double_finished + figures.audit_differences
    assert told > 0, figures
