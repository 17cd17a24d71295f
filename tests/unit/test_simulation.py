"""Simulations: the protocol's arrivals, replays by hand, and time that passes (issue's protocol: Weng et al.)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.model import Demand, Device, Node
from brim.core.placement import PRESETS, PlannerSettings, make_policy
from brim.core.simulation import Job, Server, capacity_of, possible, replay, resample, simulate
from brim.core.simulation.replay import arrivals


def server(name: str, gpus: int = 1, *, cpus: float = 0.0, mib: int = 1000, model: str = "G") -> Server:
    devices = [Device(f"{name}-{at}", name, at, model, mib, 0, 0, 0, 1000, 0) for at in range(gpus)]
    return Server(Node(name, cpus=cpus), tuple(devices))


def jobs_of(mib: int, number: int, **times: float) -> list[Job]:
    return [Job(Demand(mib), **times)] * number


class TestArrivals:
    def test_fill_up_to_the_load_with_jobs_drawn_again(self):
        queue = arrivals(jobs_of(300, 2), 1000, 1.3, random.Random(1))
        assert [job.size_mib for job in queue] == [300] * 4

    def test_are_thinned_out_to_the_load(self):
        queue = arrivals(jobs_of(300, 9), 1000, 1.3, random.Random(1))
        assert len(queue) == 4

    def test_are_all_that_there_are_when_none_asks_for_memory(self):
        assert len(arrivals([Job(Demand(0, gpus=0, cpus=1.0))] * 3, 1000, 1.3, random.Random(1))) == 3


class TestReplay:
    @pytest.mark.parametrize("policy", sorted(PRESETS))
    def test_fills_a_cluster_that_the_jobs_fit_exactly(self, policy):
        found = replay([server("a", 2)], jobs_of(500, 4), make_policy(policy), seed=1, load=1.0)
        assert [found.allocated[load] for load in (25, 50, 75, 100)] == [25.0, 50.0, 75.0, 100.0]
        assert found.allocated[74] == 50.0
        assert found.fragmentation[100] == 0.0
        assert found.decisions == 4

    def test_drops_what_fits_nowhere_and_counts_it_as_arrived(self):
        found = replay([server("a", 2)], jobs_of(600, 3), make_policy("packed"), seed=1, load=0.9)
        assert [found.allocated[load] for load in (30, 60, 90)] == [30.0, 60.0, 60.0]

    def test_free_memory_that_no_likely_task_can_use_is_fragmentation(self):
        found = replay([server("a")], jobs_of(700, 1), make_policy("first-fit"), seed=1, load=0.7)
        assert found.fragmentation[70] == pytest.approx(30.0)

    def test_the_hosts_cpus_bind(self):
        job = Job(Demand(100, cpus=3.0))
        found = replay([server("a", cpus=8.0)], [job] * 4, make_policy("packed"), seed=1, load=0.4)
        assert found.allocated[40] == 20.0

    @pytest.mark.parametrize("policy", sorted(PRESETS))
    def test_the_same_seed_gives_the_same_replay(self, policy):
        servers = [server(name, 2) for name in "abc"]
        jobs = jobs_of(300, 5) + jobs_of(700, 5)
        first, second = (replay(servers, jobs, make_policy(policy), seed=7, load=1.3, online=True) for _ in range(2))
        assert (first.allocated, first.fragmentation) == (second.allocated, second.fragmentation)

    def test_decisions_are_timed_by_the_clock_given(self):
        ticks = iter(range(100))
        found = replay(
            [server("a")], jobs_of(500, 2), make_policy("packed"), seed=1, load=1.0, clock=lambda: next(ticks)
        )
        assert found.decision_s == 2.0


class TestResample:
    def test_offers_the_load_that_was_asked_for(self):
        servers = [server("a", 4)]
        jobs = [Job(Demand(mib), at * 10.0, run) for at, (mib, run) in enumerate([(300, 50.0), (1000, 5.0)] * 20)]
        drawn = resample(jobs, servers, load=0.7, number=100, block=10, rng=random.Random(1))
        offered = sum(job.size_mib * job.run_s for job in drawn)
        assert len(drawn) == 100
        assert offered / (capacity_of(servers) * drawn[-1].arrival_s) == pytest.approx(0.7, rel=0.2)
        assert [job.arrival_s for job in drawn] == sorted(job.arrival_s for job in drawn)

    def test_only_possible_jobs_can_be_simulated(self):
        fitting, too_large = Job(Demand(900)), Job(Demand(500, gpus=2))
        assert possible([server("a")], [fitting, too_large]) == [fitting]


class TestTimed:
    def test_a_task_waits_for_the_one_before_it(self):
        jobs = [Job(Demand(600), 0.0, 100.0), Job(Demand(600), 10.0, 50.0), Job(Demand(400), 20.0, 10.0)]
        found = simulate([server("a")], jobs, make_policy("packed"), PlannerSettings(ahead=0), measured_from=0.0)
        assert sorted(found.waits_s) == [0.0, 0.0, 90.0]
        assert found.makespan_s == 150.0
        assert found.utilisation == pytest.approx((0.6 * 20 + 0.0) / 20)

    def test_one_task_per_gpu(self):
        jobs = [Job(Demand(100), 0.0, 100.0), Job(Demand(100), 0.0, 100.0)]
        settings_ = PlannerSettings(ahead=0)
        shared, alone = (
            simulate([server("a")], jobs, make_policy("best-fit"), settings_, exclusive=each, measured_from=0.0)
            for each in (False, True)
        )
        assert (max(shared.waits_s), max(alone.waits_s)) == (0.0, 100.0)

    @given(st.integers(0, 1000))
    @settings(max_examples=15, deadline=None)
    def test_a_task_for_the_whole_server_starts_though_small_ones_keep_coming(self, seed):
        """No starvation: with a promise it waits at most for what came before it; without, for the end of the flood."""
        rng = random.Random(seed)
        small = [Job(Demand(rng.choice([200, 300, 500])), at * 2.0, rng.uniform(20.0, 40.0)) for at in range(100)]
        jobs = sorted([*small, Job(Demand(1000, gpus=2), 20.5, 10.0)], key=lambda job: job.arrival_s)
        wait_s = {}
        for promises in (0, 1):
            settings_ = PlannerSettings(ahead=0, promises=promises)
            found = simulate([server("a", 2)], jobs, make_policy("packed"), settings_, measured_from=0.0)
            assert len(found.waits_s) == len(jobs)
            wait_s[promises] = found.waits_by_gpus_s[2][0]
        assert wait_s[1] <= sum(job.run_s for job in jobs if job.arrival_s < 20.5)
        assert wait_s[0] > small[-1].arrival_s
