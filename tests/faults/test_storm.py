"""Short storms: brim holds, and the storm would tell if it did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.storm import Storm, replay

pytestmark = [pytest.mark.large, pytest.mark.timeout(400)]


@pytest.mark.parametrize("seed", [7])
def test_brim_holds_in_a_storm(seed: int, tmp_path: Path) -> None:
    figures = Storm(tmp_path, 15.0, seed).run()

    assert figures.held, f"{figures}\nreplay: {replay(figures)}"
    assert figures.tasks > 10
    assert figures.kills > 0


def test_without_fencing_a_storm_tells(tmp_path: Path) -> None:
    """A node that was declared lost while it was paused finishes what has been given to another one."""
    storm = Storm(
        tmp_path,
        32.0,
        1,
        faults={"pause_agent": 1},
        mix={"long": 1},
        outstanding=3,
        lease_s=2.0,
        pauses=(4.5, 5.0),
        every_s=10.0,
        longest_s=10.0,
        latest_s=10.0,
        sabotage="fencing",
    )

    assert storm.run().double_finished > 0


def test_without_the_guard_of_admission_a_storm_tells(tmp_path: Path) -> None:
    """What Celery puts back into the queue for a killed executor is admitted once more."""
    faults, mix = {"executor": 1}, {"long": 1}
    storm = Storm(tmp_path, 10.0, 2, faults=faults, mix=mix, longest_s=3.0, latest_s=8.0, sabotage="admission")

    assert not storm.run().held


def test_without_reclaim_a_storm_tells(tmp_path: Path) -> None:
    """The attempts of killed executors are never taken back."""
    faults, mix = {"executor": 1}, {"long": 1}
    storm = Storm(tmp_path, 8.0, 3, faults=faults, mix=mix, longest_s=3.0, latest_s=8.0, sabotage="reclaim")

    assert storm.run().lost > 0
