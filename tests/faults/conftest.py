"""One cluster for all tests of single faults: each leaves it as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.cluster import Cluster, cluster
from faults.skew import COMPILER, skewed
from faults.town import Town

SETTINGS = {
    "placement__lease_timeout_s": 5.0,
    "placement__start_timeout_s": 3.0,
    "placement__leader_ttl_s": 2.0,
    "placement__visibility_timeout_s": 60.0,
    "intake__level1_limit": 2_000,
    "intake__unfit_grace_s": 1.0,
    "agent__restart_backoff_s": 0.1,
    "agent__headroom_mib": 200,
}
TRANSPORT = {"visibility_timeout": 2, "unacked_restore_interval": 0.5, "unacked_restore_throttle": 1}
"""Celery looks twice a second for messages that were taken more than 2 s ago; many tasks run longer than that."""


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of one device, two placements, one intake; the second node's clock is ahead."""
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(
        folder,
        nodes=2,
        placements=2,
        device="8GiB",
        settings=SETTINGS,
        transport=TRANSPORT,
        clocks={"n2": skewed(folder)} if COMPILER else {},
    ) as made:
        yield made


@pytest.fixture
def town(started: Cluster, tmp_path: Path) -> Iterator[Town]:
    """The cluster, complete and idle before and after; nothing in it has crashed, and its books are right."""
    made = Town(started, tmp_path)
    made.settle()
    yield made
    made.release()
    made.settle()
    made.check()
