"""Outages of 30 s with the leases of the default settings: twice what the other tests of faults have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.settings import Settings
from faults.cluster import cluster
from faults.town import Town

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]

PAUSE_S = 30.0


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    """Two nodes and two placements with the default settings."""
    with cluster(tmp_path, nodes=2, placements=2) as made:
        town = Town(made, tmp_path)
        town.settle()
        yield town
        town.release()
        town.settle()
        town.check()


def test_redis_unreachable_for_half_a_minute(town: Town) -> None:
    assert 2 * Settings().placement.lease_timeout_s <= PAUSE_S
    town.is_without_redis(PAUSE_S)


def test_placement_paused_for_half_a_minute(town: Town) -> None:
    town.has_placement_paused(PAUSE_S)
