"""When a waiting task will start: the queue played forward with run times that were seen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.model import Demand, Node, Reason
from brim.core.placement.cluster import Cluster
from brim.core.placement.expect import KEPT, LEAST, MOST_AHEAD, Ahead, Running, RunTimes, Work, expected_start
from unit.placement_cases import GIB, cluster_of, device

SMALL = Work("segment", "segment|4GiB", Demand(4 * GIB))
BIG = Work("segment", "segment|20GiB", Demand(20 * GIB))


def runs_of(*seconds: float, work: Work = SMALL) -> RunTimes:
    runs = RunTimes()
    for each in seconds:
        runs.add(work.task, work.lane, each)
    return runs


def busy(tasks: int, executors: int = 4) -> Cluster:
    """One device with so many small tasks on it."""
    return cluster_of([device("a", committed_mib=tasks * 4 * GIB, busy=tasks, executors=executors)])


def on_a(*ages_s: float, work: Work = SMALL) -> list[Running]:
    return [Running(work, ("GPU-a-0",), age_s) for age_s in ages_s]


class TestWhereRunTimesDoNotScatter:
    runs = runs_of(10, 10, 10)

    def expect(self, cluster: Cluster, running: list[Running], ahead: list[Ahead], own: Work) -> object:
        return expected_start(cluster, running, ahead, own, self.runs, "id")

    def test_a_task_starts_when_the_first_executor_is_free(self):
        assert self.expect(busy(4), on_a(0, 2, 4, 6), [], SMALL) == (4, 4)

    def test_those_before_it_come_first(self):
        assert self.expect(busy(4), on_a(0, 2, 4, 6), [Ahead(SMALL, 3)], SMALL) == (10, 10)
        assert self.expect(busy(4), on_a(0, 2, 4, 6), [Ahead(SMALL, 4)], SMALL) == (14, 14)

    def test_a_large_one_waits_until_enough_has_ended(self):
        assert self.expect(busy(4), on_a(0, 2, 4, 6), [], BIG) == (10, 10)

    def test_what_fits_now_starts_now(self):
        assert self.expect(busy(3), on_a(0, 2, 4), [], SMALL) == (0, 0)

    def test_it_needs_all_its_gpus_on_one_node(self):
        made = [device("a", index, committed_mib=20 * GIB, busy=1) for index in (0, 1)]
        made.append(device("b", committed_mib=20 * GIB, busy=1))
        running = [Running(SMALL, (each.uuid,), age_s) for each, age_s in zip(made, (2.0, 5.0, 9.0), strict=True)]
        running = [Running(BIG, each.devices, each.age_s) for each in running]
        pair = Work("segment", "segment|2x20GiB", Demand(20 * GIB, gpus=2))
        assert self.expect(cluster_of(made), running, [], pair) == (8, 8)

    def test_a_whole_gpu_must_be_empty(self):
        whole = Work("segment", "segment|all", Demand(GIB, whole=True))
        assert self.expect(busy(2), on_a(0, 2), [], whole) == (10, 10)

    def test_host_cpus_count(self):
        cluster = cluster_of([device("a", committed_mib=4 * GIB, busy=1)], [Node("a", cpus=4, cpus_used=4)])
        fed = Work("segment", "segment|cpus", Demand(4 * GIB, cpus=4))
        assert self.expect(cluster, on_a(3, work=fed), [], fed) == (7, 7)

    def test_leftover_of_idle_executors_is_in_nobodys_way(self):
        cluster = cluster_of([device("a", committed_mib=23 * GIB, reclaimable_mib=23 * GIB)])
        assert self.expect(cluster, [], [], BIG) == (0, 0)


class TestUnknown:
    def test_without_run_times_nothing_is_said(self):
        told = expected_start(busy(4), on_a(0, 0, 0, 0), [], SMALL, RunTimes(), "id")
        assert told == Reason("run_times", "it is not known yet how long segment runs")
        few = runs_of(*[10] * (LEAST - 1))
        assert isinstance(expected_start(busy(4), on_a(0, 0, 0, 0), [], SMALL, few, "id"), Reason)

    def test_nor_of_what_waits_for_tasks_that_run_longer_than_any_before(self):
        told = expected_start(busy(4), on_a(11, 11, 12, 13), [], SMALL, runs_of(10, 10, 10), "id")
        assert isinstance(told, Reason)
        assert "longer" in told.message

    def test_nor_of_what_fits_nowhere(self):
        huge = Work("segment", "segment|99GiB", Demand(99 * GIB))
        assert isinstance(expected_start(busy(1), on_a(1), [], huge, runs_of(10, 10, 10), "id"), Reason)
        elsewhere = Work("unheard-of", "x", Demand(GIB))
        assert isinstance(expected_start(busy(1), on_a(1), [], elsewhere, runs_of(10, 10, 10), "id"), Reason)

    def test_nor_of_what_is_far_from_its_turn(self):
        told = expected_start(busy(4), on_a(1, 1, 1, 1), [Ahead(SMALL, MOST_AHEAD + 1)], SMALL, runs_of(1, 1, 1), "id")
        assert isinstance(told, Reason)
        assert told.code == "far"


class TestRunTimes:
    def test_those_of_the_lane_come_before_those_of_the_name(self):
        runs = runs_of(10, 20, 30)
        assert list(runs.of(SMALL)) == [10, 20, 30]
        assert list(runs.of(BIG)) == [10, 20, 30]
        for seconds in (5, 7, 6):
            runs.add(BIG.task, BIG.lane, seconds)
        assert list(runs.of(BIG)) == [5, 6, 7]
        assert list(runs.of(Work("other", "lane", Demand(1)))) == []

    @given(st.lists(st.floats(0, 1e6), min_size=LEAST, max_size=KEPT + 50))
    @settings(deadline=None, max_examples=30)
    def test_the_latest_are_kept(self, seconds):
        assert list(runs_of(*seconds).of(SMALL)) == sorted(seconds[-KEPT:])


@given(
    st.lists(st.floats(1, 100), min_size=LEAST, max_size=20),
    st.lists(st.floats(0, 50), min_size=4, max_size=4),
    st.integers(0, 30),
)
@settings(deadline=None, max_examples=60)
def test_a_range_lies_within_what_run_times_allow(seconds, ages, before):
    runs = runs_of(*seconds)
    told = expected_start(busy(4), on_a(*ages), [Ahead(SMALL, before)] if before else [], SMALL, runs, "id")
    assert told == expected_start(busy(4), on_a(*ages), [Ahead(SMALL, before)] if before else [], SMALL, runs, "id")
    if isinstance(told, Reason):
        assert any(age >= max(seconds) for age in ages)
        return
    first, last = told
    assert 0 <= first <= last <= (before + 4) * max(seconds)
    if all(age < max(seconds) for age in ages):
        # four at a time: before the task can start, those before it that do not fit into the first round have run
        assert first >= min(seconds) * max(0, before - 3) / 4 - max(ages)


def test_the_range_widens_with_how_much_run_times_scatter():
    running, ahead = on_a(0, 0, 0, 0), [Ahead(SMALL, 10)]
    narrow = expected_start(busy(4), running, ahead, SMALL, runs_of(*[9, 10, 11] * 10), "id")
    wide = expected_start(busy(4), running, ahead, SMALL, runs_of(*[1, 10, 40] * 10), "id")
    assert isinstance(narrow, tuple)
    assert isinstance(wide, tuple)
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_other_draws_give_about_the_same_range(seed):
    runs, running, ahead = runs_of(*range(1, 40)), on_a(0, 1, 2, 3), [Ahead(SMALL, 12)]
    first, last = expected_start(busy(4), running, ahead, SMALL, runs, seed)
    for number in range(30):
        other_first, other_last = expected_start(busy(4), running, ahead, SMALL, runs, f"{seed}{number}")
        assert first * 0.7 <= (other_first + other_last) / 2 <= last * 1.3
