"""Intake and placement that die, stop, or meet each other."""

from __future__ import annotations

import dataclasses
import signal
import time

import pytest

from brim.core.model import State
from faults.service import DIE_ENV
from faults.town import Town
from support.waiting import within_s


def dies_at(town: Town, name: str, point: str) -> None:
    """Start a service that will be killed at this point, and not come back."""
    command = town.cluster.service(name)
    environment = {**command.environment, DIE_ENV: point}
    town.cluster.supervisor.start(
        dataclasses.replace(command, name=f"{name}-{point}", environment=environment, restart=None)
    )


def has_died(town: Town, name: str, point: str) -> bool:
    """Whether that one has been killed, by itself."""
    return town.cluster.pid(f"{name}-{point}") is None


@pytest.mark.parametrize("point", ["admit:before:1", "admit:after:1"])
def test_intake_killed_between_any_two_steps(town: Town, point: str) -> None:
    town.cluster.supervisor.stop("intake1")
    try:
        dies_at(town, "intake1", point)
        results = [town.publish("work", mib=300, seconds=0.0) for _ in range(3)]
        _wait_for_death(town, "intake1", point)
    finally:
        town.cluster.supervisor.start(town.cluster.service("intake1"))

    assert [town.get(result) for result in results] == [300] * 3
    assert [town.told(result).count("admitted") for result in results] == [1] * 3


@pytest.mark.parametrize("point", ["take:after:1", "commit:before:1", "commit:after:1"])
def test_placement_killed_between_any_two_steps(town: Town, point: str) -> None:
    town.cluster.supervisor.stop(*town.placements())
    try:
        dies_at(town, "placement1", point)
        results = [town.publish("work", mib=300, seconds=0.0) for _ in range(3)]
        _wait_for_death(town, "placement1", point)
    finally:
        for name in town.placements():
            town.cluster.supervisor.start(town.cluster.service(name))

    assert [town.get(result) for result in results] == [300] * 3
    town.settle()  # an end is told behind its result
    assert [town.told(result).count("succeeded") for result in results] == [1] * 3


def _wait_for_death(town: Town, name: str, point: str) -> None:
    child = town.cluster.supervisor.children[f"{name}-{point}"]
    deadline = time.monotonic() + within_s(30.0)
    while child.pid is not None:
        assert time.monotonic() < deadline, f"{name} has not come to {point}: {child.last_lines()}"
        town.cluster.supervisor.poll()
        time.sleep(0.02)


def test_a_second_placement_standing_by(town: Town) -> None:
    town.wait_until(town.active, "one is active")
    first = town.active()
    town.cluster.kill(first)
    since = time.monotonic()

    result = town.publish("work", mib=300, seconds=0.0)
    assert town.get(result) == 300

    assert time.monotonic() - since < within_s(5.0)


def test_placement_paused_and_resumed_after_a_standby_took_over(town: Town) -> None:
    """It pauses for longer than a placement's lease, 2 s here; 30 s: tests/faults/test_half_a_minute.py."""
    town.has_placement_paused(4.0)


@pytest.mark.parametrize("name", ["intake1", "placement1"])
def test_sigterm_to_anything(town: Town, name: str) -> None:
    """The agent's drain is tested with the agent (tests/integration/test_agent.py)."""
    pid = town.cluster.pid(name)
    since = time.monotonic()
    town.cluster.signal(name, signal.SIGTERM)

    result = town.publish("work", mib=300, seconds=0.0)
    town.wait_until(lambda: town.cluster.pid(name) not in (None, pid), "it has ended and is there again")

    assert time.monotonic() - since < within_s(10.0)
    assert town.get(result) == 300
    assert town.wait_for(result, State.SUCCEEDED).attempts == 1
