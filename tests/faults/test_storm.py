"""Short storms: brim holds, and the storm would tell if it did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.storm import Storm, replay

pytestmark = pytest.mark.timeout(400)

SMALL = {"nodes": 1, "intakes": 1, "placements": 1}


@pytest.mark.parametrize("seed", [7])
def test_brim_holds_in_a_storm(seed: int, tmp_path: Path) -> None:
    figures = Storm(tmp_path, 12.0, seed).run()

    assert figures.held, f"{figures}\nreplay: {replay(figures)}"
    assert figures.tasks > 10
    assert figures.kills > 0
    assert figures.items > 0
    assert figures.executors_started > 0


@pytest.mark.large
def test_without_fencing_a_storm_tells(tmp_path: Path) -> None:
    """A node that was declared lost while it was paused finishes what has been given to another one."""
    storm = Storm(
        tmp_path,
        20.0,
        1,
        faults={"pause_agent": 1},
        mix={"long": 1},
        outstanding=4,
        lease_s=1.5,
        pauses=(8.0, 8.0),
        first_s=1.5,
        every_s=60.0,
        longest_s=10.0,
        latest_s=10.0,
        sabotage="fencing",
        intakes=1,
        placements=1,
    )

    figures = storm.run()

    assert figures.double_finished + figures.audit_differences > 0, figures


@pytest.mark.large
def test_without_the_guard_of_admission_a_storm_tells(tmp_path: Path) -> None:
    """What Celery puts back into the queue for a killed executor is admitted once more."""
    faults, mix = {"busy_executor": 1}, {"long": 1}
    storm = Storm(
        tmp_path,
        20.0,
        2,
        faults=faults,
        mix=mix,
        outstanding=2,
        longest_s=3.0,
        latest_s=10.0,
        sabotage="admission",
        **SMALL,
    )

    figures = storm.run()

    assert figures.double_finished + figures.audit_differences > 0, figures


@pytest.mark.large
def test_without_reclaim_a_storm_tells(tmp_path: Path) -> None:
    """The attempts of killed executors are never taken back."""
    faults, mix = {"busy_executor": 1}, {"long": 1}
    storm = Storm(
        tmp_path,
        2.0,
        3,
        faults=faults,
        mix=mix,
        outstanding=2,
        longest_s=2.0,
        latest_s=8.0,
        sabotage="reclaim",
        **SMALL,
    )

    assert storm.run().lost > 0
