"""Plans: order, backfill, promises, reasons, and what must hold for every plan (invariants 1, 5, 6, 7)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.model import Demand, Node
from brim.core.placement import (
    NO_PROMISES,
    PRESETS,
    Cluster,
    Mix,
    Planner,
    PlannerSettings,
    Promise,
    make_policy,
    node_shortage,
    shortage,
)
from unit.placement_cases import GIB, check_plan, cluster_of, device, devices, lane, lanes, nodes

SMALL = Demand(4 * GIB)
BIG = Demand(20 * GIB)
policies = st.sampled_from(sorted(PRESETS))


def planner(policy: str = "balanced", **fields: object) -> Planner:
    return Planner(make_policy(policy), PlannerSettings(**fields))  # type: ignore[arg-type]


class TestEveryPlan:
    @given(devices(), nodes(), lanes(), policies, st.tuples(st.integers(0, 1), st.integers(0, 2)))
    @settings(max_examples=150, deadline=None)
    def test_can_be_committed_and_gives_a_reason_to_whoever_waits(self, made, servers, queue, policy, chosen):
        ahead, promises = chosen
        plan = planner(policy, ahead=ahead, promises=promises).plan(cluster_of(made, servers), queue, 100.0)
        check_plan(plan, cluster_of(made, servers), queue, ahead)
        assert len(plan.promises) <= promises

    @given(devices(), nodes(), lanes(), policies, st.randoms())
    @settings(max_examples=60, deadline=None)
    def test_is_the_same_for_the_same_snapshot_in_whatever_order_it_was_fed(self, made, servers, queue, policy, random):
        cluster = cluster_of(made, servers)
        first = planner(policy).plan(cluster, queue, 100.0)
        again = planner(policy).plan(cluster, queue, 100.0)
        random.shuffle(made)
        random.shuffle(queue)
        shuffled = planner(policy).plan(cluster_of(made, servers), queue, 100.0)
        assert first == again == shuffled

    @given(devices(), nodes(), lanes())
    @settings(max_examples=100, deadline=None)
    def test_leaves_no_head_waiting_where_it_fits_unless_a_promise_is_in_the_way(self, made, servers, queue):
        cluster = cluster_of(made, servers)
        plan = planner().plan(cluster, queue, 100.0)
        for placement in plan.placements:
            cluster.reserve(placement.devices, placement.demand)
        for waiting in queue:
            reason = plan.waits.get(waiting.key)
            if reason is None or reason.code == "promised":
                continue
            for site in cluster:
                fitting = [
                    each
                    for each in site.devices
                    if cluster.runs(each, waiting.task) and shortage(each, waiting.demand) is None
                ]
                assert len(fitting) < waiting.demand.gpus or node_shortage(site.node, waiting.demand)

    @given(devices(), nodes(), st.lists(lanes(), min_size=2, max_size=4), policies, st.randoms())
    @settings(max_examples=40, deadline=None)
    def test_what_a_planner_remembers_changes_nothing(self, made, servers, queues, policy, random):
        """Incremental equals afresh: one planner follows a changing cluster, another one sees it for the first time."""
        cluster, kept = cluster_of(made, servers), planner(policy, promises=2)
        promises = NO_PROMISES
        for now_s, queue in enumerate(queues):
            plan = kept.plan(cluster, queue, float(now_s), promises)
            fresh = planner(policy, promises=2).plan(cluster, queue, float(now_s), promises)
            assert (plan.placements, plan.promises) == (fresh.placements, fresh.promises)
            promises = plan.promises
            for placement in plan.placements:
                cluster.reserve(placement.devices, placement.demand)
            cluster.settle()
            changed = random.choice(made)
            free = replace(changed, committed_mib=random.choice([0, changed.committed_mib]), busy=random.choice([0, 2]))
            cluster.update(free)
            again = kept.plan(cluster, queue, now_s + 0.5, promises)
            fresh = planner(policy, promises=2).plan(cluster, queue, now_s + 0.5, promises)
            assert (again.placements, again.promises) == (fresh.placements, fresh.promises)


class TestOrder:
    def test_lower_score_starts_first_across_lanes(self):
        cluster = cluster_of([device(executors=2)])
        plan = planner(ahead=0).plan(cluster, [lane("x", SMALL, 3, 5), lane("y", SMALL, 4)], 0.0)
        assert [placement.task_id for placement in plan.placements] == ["x-3", "y-4"]

    def test_balanced_spreads_over_servers_and_their_gpus(self):
        cluster = cluster_of([device(node, index) for node in "ab" for index in (0, 1)])
        plan = planner().plan(cluster, [lane("x", SMALL, 1, 2, 3, 4)], 0.0)
        assert len({placement.devices for placement in plan.placements}) == 4

    def test_satisfaction_keeps_room_for_the_demands_that_are_likely_to_come(self):
        # given: b's rest of 7 GiB is of no use to the 8 GiB tasks that dominate, a's 8 GiB is
        mix = Mix()
        for _ in range(10):
            mix.observe(Demand(8 * GIB))
        made = [
            device("a", committed_mib=24 * GIB - 512 - 8 * GIB, busy=1),
            device("b", committed_mib=24 * GIB - 512 - 7 * GIB, busy=1),
        ]
        # when a small task comes
        plan = Planner(make_policy("balanced"), mix=mix).plan(cluster_of(made), [lane("x", SMALL, 1)], 0.0)
        # then it goes where nothing is lost
        assert plan.placements[0].devices == ("GPU-b-0",)

    def test_a_multi_gpu_task_gets_distinct_gpus_of_one_node(self):
        cluster = cluster_of([device("a", 0), device("b", 0), device("b", 1)])
        plan = planner().plan(cluster, [lane("x", replace(BIG, gpus=2), 1)], 0.0)
        assert plan.placements[0].devices == ("GPU-b-0", "GPU-b-1")


class TestAhead:
    def test_a_task_goes_behind_busy_executors_when_no_device_has_an_idle_one(self):
        cluster = cluster_of([device("a", busy=4), device("b", busy=4)])
        plan = planner().plan(cluster, [lane("x", SMALL, 1, 2, 3)], 0.0)
        assert [placement.behind for placement in plan.placements] == [True, True]
        assert plan.waits["x"].code == "executors"

    def test_not_while_an_eligible_device_has_an_idle_executor_but_no_memory(self):
        cluster = cluster_of([device("a", busy=4), device("b", committed_mib=22 * GIB)])
        plan = planner().plan(cluster, [lane("x", SMALL, 1)], 0.0)
        assert not plan.placements
        assert plan.waits["x"].code == "executors"


class TestReasons:
    @pytest.mark.parametrize(
        ("fields", "demand", "task", "code", "message"),
        [
            ({"tasks": "none"}, SMALL, "segment", "no_worker", "no worker has registered segment"),
            ({"tasks": "some"}, SMALL, "train", "no_worker", "no worker has registered train"),
            ({}, Demand(24 * GIB), "segment", "too_large", "too large for gpu0@a by 512 MiB"),
            ({"committed_mib": 20 * GIB}, SMALL, "segment", "memory", "memory short by 512 MiB on gpu0@a"),
            (
                {"model": "T4"},
                replace(SMALL, gpu_models=("A100",)),
                "segment",
                "model",
                "gpu0@a is a T4, not A100",
            ),
            ({"state": "lost"}, SMALL, "segment", "state", "gpu0@a is lost"),
            ({}, replace(SMALL, gpus=2), "segment", "too_large", "2 GPUs on one node asked for, a has 1"),
            ({}, replace(SMALL, labels=(("zone", "x"),)), "segment", "labels", "node a has no label zone=x"),
            ({}, replace(SMALL, cpus=1.5), "segment", "cpus", "host CPUs short by 0.5 on node a"),
            (
                {},
                replace(SMALL, cpus=3),
                "segment",
                "too_large",
                "host CPUs short by 1 on node a, even if nothing runs there",
            ),
        ],
    )
    def test_name_the_short_resource(self, fields, demand, task, code, message):
        cluster = cluster_of([device(**fields)], [Node("a", cpus=2, cpus_used=1)])
        reason = planner().plan(cluster, [lane("x", demand, 1, task=task)], 0.0).waits["x"]
        assert (reason.code, reason.message) == (code, message)

    def test_come_from_the_place_that_is_nearest_to_taking_the_task(self):
        made = [
            device("a", committed_mib=23 * GIB),
            device("b", committed_mib=20 * GIB),
            device("c", model="T4"),
        ]
        demand = replace(SMALL, gpu_models=("A100",))
        reason = planner().plan(cluster_of(made), [lane("x", demand, 1)], 0.0).waits["x"]
        assert reason.message == "memory short by 512 MiB on gpu0@b"

    def test_an_empty_cluster_has_no_worker(self):
        assert planner().plan(Cluster(), [lane("x", SMALL, 1)], 0.0).waits["x"].code == "no_worker"


class TestPromise:
    def test_what_frees_there_is_kept_for_the_head_while_others_pass_elsewhere(self):
        # given: both devices are too full for the big head; a is nearer to taking it
        full = [device("a", committed_mib=12 * GIB, busy=3), device("b", committed_mib=16 * GIB, busy=3)]
        queue = [lane("big", BIG, 1), lane("small", SMALL, 2, 3)]
        # when
        plan = planner().plan(cluster_of(full), queue, 5.0)
        # then: a is promised; one small task passes on b, the other may not go to a
        assert plan.promises == {
            "big-1": Promise("big", "a", ("GPU-a-0",), BIG, 5.0),
        }
        assert [placement.devices for placement in plan.placements] == [("GPU-b-0",)]
        assert plan.waits["small"].code == "promised"
        assert plan.waits["small"].message == "gpu0@a is promised to task big-1"

    def test_a_small_task_may_go_beside_if_the_promised_one_still_fits_beside_it(self):
        tiny = Demand(2 * GIB)
        cluster = cluster_of([device("a", committed_mib=12 * GIB, busy=1)])
        plan = planner().plan(cluster, [lane("big", BIG, 1), lane("tiny", tiny, 2, 3)], 0.0)
        assert [placement.task_id for placement in plan.placements] == ["tiny-2"]
        promise = plan.promises["big-1"]
        assert [other.task_id for other in promise.beside] == ["tiny-2"]
        # once it has ended, another may take its place
        queue = [lane("big", BIG, 1), lane("tiny", tiny, 3)]
        assert not planner().plan(cluster, queue, 1.0, {"big-1": promise}).placements
        relieved = {"big-1": promise.relieved("tiny-2")}
        assert planner().plan(cluster, queue, 1.0, relieved).placements

    def test_is_kept_until_the_task_starts_and_then_gone(self):
        queue = [lane("big", BIG, 1)]
        busy = cluster_of([device("a", committed_mib=12 * GIB), device("b", committed_mib=13 * GIB)])
        first = planner().plan(busy, queue, 1.0)
        assert first.promises["big-1"].node == "a"
        busy.update(device("b", committed_mib=5 * GIB))
        later = planner().plan(busy, queue, 2.0, first.promises)
        assert later.promises == first.promises
        busy.update(device("b"))
        last = planner().plan(busy, queue, 3.0, later.promises)
        assert last.placements[0].devices == ("GPU-b-0",)
        assert last.promises == {}

    def test_is_dropped_when_its_device_is_lost_or_its_task_is_gone(self):
        made = [device("a", committed_mib=12 * GIB), device("b", committed_mib=13 * GIB)]
        first = planner().plan(cluster_of(made), [lane("big", BIG, 1)], 1.0)
        lost = cluster_of([replace(made[0], state="lost"), made[1]])
        assert planner().plan(lost, [lane("big", BIG, 1)], 2.0, first.promises).promises["big-1"].node == "b"
        assert planner().plan(cluster_of(made), [lane("big", BIG)], 2.0, first.promises).promises == {}

    def test_passes_to_a_more_urgent_task_of_the_same_lane(self):
        cluster = cluster_of([device("a", committed_mib=12 * GIB)])
        first = planner().plan(cluster, [lane("big", BIG, 5)], 1.0)
        later = planner().plan(cluster, [lane("big", BIG, 2, 5)], 2.0, first.promises)
        assert later.promises == {"big-2": first.promises["big-5"]}

    def test_waits_for_the_age_that_the_owner_has_set(self):
        cluster = cluster_of([device("a", committed_mib=12 * GIB)])
        patient = planner(promise_after_s=30.0)
        assert not patient.plan(cluster, [lane("big", BIG, 1, admitted_s=0.0)], 29.0).promises
        assert patient.plan(cluster, [lane("big", BIG, 1, admitted_s=0.0)], 30.0).promises

    def test_goes_on_to_the_most_urgent_head_as_soon_as_its_owner_starts(self):
        # given: a less urgent lane holds the promise when a more urgent big task comes
        cluster = cluster_of([device("a", committed_mib=20 * GIB, busy=1)])
        first = planner().plan(cluster, [lane("small", SMALL, 5, 6, 7)], 1.0)
        assert list(first.promises) == ["small-5"]
        # when room comes free for one small task, but not for the big one
        cluster.update(device("a", committed_mib=12 * GIB, busy=1))
        later = planner().plan(cluster, [lane("small", SMALL, 5, 6, 7), lane("big", BIG, 1)], 2.0, first.promises)
        # then the promised one starts, and the rest is kept for the big one
        assert [placement.task_id for placement in later.placements] == ["small-5"]
        assert list(later.promises) == ["big-1"]

    def test_wakes_whoever_slept_because_of_it_in_the_plan_in_which_it_ends(self):
        # given: node a is promised to the big task, so that nothing of the small one's fits there beside it
        middle, chosen = Demand(6 * GIB, gpu_models=("T4",)), planner(promises=1)
        made = [device("a", model="T4", committed_mib=12 * GIB), device("b", committed_mib=23 * GIB)]
        cluster = cluster_of(made)
        queue = [lane("big", BIG, 1), lane("middle", middle, 2)]
        first = chosen.plan(cluster, queue, 1.0)
        assert first.promises["big-1"].node == "a"
        assert not first.placements
        # when another node can take the big one alone
        cluster.update(device("b"))
        later = chosen.plan(cluster, queue, 2.0, first.promises)
        # then the other one starts where it was kept out
        assert [(start.task_id, start.node) for start in later.placements] == [("big-1", "b"), ("middle-2", "a")]

    def test_goes_where_the_fewest_attempts_must_end(self):
        full = [device("a", committed_mib=12 * GIB, busy=3), device("b", committed_mib=16 * GIB, busy=1)]
        plan = planner().plan(cluster_of(full), [lane("big", BIG, 1)], 5.0)
        assert plan.promises["big-1"].node == "b"

    def test_goes_where_attempts_are_young(self):
        cluster = cluster_of([device(node, committed_mib=16 * GIB, busy=2) for node in "ab"])
        cluster.began("GPU-a-0", [10.0, 2000.0])
        cluster.began("GPU-b-0", [1500.0, 1600.0])
        assert planner().plan(cluster, [lane("big", BIG, 1)], 5000.0).promises["big-1"].node == "b"
        cluster.began("GPU-b-0", [0.0, 1600.0])
        assert planner().plan(cluster, [lane("big", BIG, 1)], 5000.0).promises["big-1"].node == "a"

    def test_goes_to_those_who_have_asked_for_the_most_for_the_longest(self):
        cluster = cluster_of([device("a", committed_mib=23 * GIB, busy=1)])
        queue = [lane("small", SMALL, 1, admitted_s=0.0), lane("big", BIG, 2, admitted_s=50.0)]
        assert list(planner().plan(cluster, queue, 60.0).promises) == ["small-1"]
        assert list(planner().plan(cluster, queue, 100.0).promises) == ["big-2"]

    def test_is_not_kept_from_others_by_heads_that_could_never_fit(self):
        cluster = cluster_of([device("a", committed_mib=23 * GIB, busy=1)])
        queue = [lane("huge", Demand(99 * GIB), 1), lane("big", BIG, 2)]
        assert list(planner().plan(cluster, queue, 1.0).promises) == ["big-2"]

    def test_is_not_given_for_what_could_never_fit(self):
        plan = planner().plan(cluster_of([device()]), [lane("huge", Demand(99 * GIB), 1)], 0.0)
        assert plan.promises == {}

    def test_a_refused_commit_is_planned_again_with_the_promises_from_before(self):
        cluster = cluster_of([device("a", committed_mib=12 * GIB)])
        before = planner().plan(cluster, [lane("big", BIG, 1)], 1.0).promises
        cluster.update(device("a"))
        assert planner().plan(cluster, [lane("big", BIG, 1)], 2.0, before).promises == {}
        cluster.update(device("a", committed_mib=12 * GIB))
        assert planner().plan(cluster, [lane("big", BIG, 1)], 3.0, before).promises == before


class TestRecycle:
    def test_names_the_device_whose_leftover_alone_blocks_the_head(self):
        cluster = cluster_of(
            [device("a", committed_mib=12 * GIB), device("b", committed_mib=9 * GIB, reclaimable_mib=9 * GIB)]
        )
        plan = planner().plan(cluster, [lane("big", BIG, 1)], 0.0)
        assert plan.recycle == ["GPU-b-0"]
        assert plan.promises["big-1"].node == "b"

    def test_not_where_more_than_the_leftover_is_in_the_way(self):
        cluster = cluster_of([device("a", committed_mib=12 * GIB, reclaimable_mib=1 * GIB)])
        assert planner().plan(cluster, [lane("big", BIG, 1)], 0.0).recycle == []

    def test_names_devices_whose_idle_executors_keep_a_whole_gpu_from_being_empty(self):
        cluster = cluster_of([device("a", i, committed_mib=300, reclaimable_mib=300) for i in range(3)])
        plan = planner().plan(cluster, [lane("whole", Demand(1, gpus=2, whole=True), 1)], 0.0)
        assert len(plan.recycle) == 2
        assert plan.waits["whole"].code == "memory"

    def test_says_so_where_idle_executors_may_keep_it(self):
        cluster = cluster_of([device("a", committed_mib=300, reclaimable_mib=300)])
        plan = planner(keeps_leftover=True).plan(cluster, [lane("whole", Demand(1, whole=True), 1)], 0.0)
        assert plan.recycle == []
        assert plan.waits["whole"].code == "leftover"
        assert "what idle executors keep on gpu0@a, 300 MiB, is all that" in plan.waits["whole"].message


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_a_planner_remembers_which_of_a_nodes_unlike_devices_is_full(policy):
    made = [device(index=index, model=model) for index, model in enumerate(("A100", "T4"))]
    cluster, kept = cluster_of(made), planner(policy)
    wanted = [lane(one.model, Demand(20 * GIB, gpu_models=(one.model,)), 1) for one in made]
    for full, empty in (made, made[::-1], made):
        cluster.update(replace(full, committed_mib=20 * GIB))
        cluster.update(empty)
        plan = kept.plan(cluster, wanted, 0.0)
        assert [placement.devices for placement in plan.placements] == [(empty.uuid,)]


def test_a_node_may_have_more_than_64_devices():
    cluster = cluster_of([device(index=index, executors=int(index == 69)) for index in range(70)])
    plan = planner().plan(cluster, [lane("x", SMALL, 1)], 0.0)
    assert [placement.devices for placement in plan.placements] == [("GPU-a-69",)]


def test_parts_of_a_gpu_are_not_combined():
    cluster = cluster_of([device("a", i, model="A100 MIG 1g.5gb") for i in range(2)])
    plan = planner().plan(cluster, [lane("pair", Demand(1000, gpus=2), 1), lane("one", Demand(1000), 2)], 0.0)
    assert [placement.task_id for placement in plan.placements] == ["one-2"]
    assert plan.waits["pair"].code == "model"


def test_ignoring_memory_fills_every_executor():
    cluster = cluster_of([device()])
    plan = planner(ignore_memory=True, ahead=0).plan(cluster, [lane("big", BIG, 1, 2, 3, 4, 5)], 0.0)
    assert len(plan.placements) == 4
    assert plan.waits["big"].code == "executors"


@given(st.lists(st.integers(1, 9), min_size=20, max_size=20), policies)
@settings(max_examples=25, deadline=None)
def test_a_big_head_starts_although_small_tasks_keep_coming(run_times, policy):
    """No starvation: every tick more small tasks arrive than fit, and the big one still gets its turn."""
    cluster = cluster_of([device("a", index) for index in (0, 1)])
    decide = planner(policy)
    running: list[tuple[int, str, tuple[str, ...], Demand]] = []
    promises = {}
    waiting = [f"small-{number}" for number in range(500)]
    sizes = {"small": SMALL, "big": BIG}
    for tick in range(40):
        ended = [entry for entry in running if entry[0] <= tick]
        running = [entry for entry in running if entry[0] > tick]
        promises = {owner: _relieved(promise, [entry[1] for entry in ended]) for owner, promise in promises.items()}
        for _, _, where, demand in ended:
            for uuid in where:
                held = cluster.device(uuid)
                cluster.update(replace(held, committed_mib=held.committed_mib - demand.vram_mib, busy=held.busy - 1))
        queue = [lane("small", SMALL, *[float(name.split("-")[1]) for name in waiting[:20]])]
        if tick >= 5:
            queue.append(lane("big", BIG, 4.5))
        plan = decide.plan(cluster, queue, float(tick), promises)
        promises = plan.promises
        for placement in plan.placements:
            if placement.lane == "big":
                return
            waiting.remove(placement.task_id)
            cluster.reserve(placement.devices, placement.demand)
            length = run_times[len(waiting) % len(run_times)]
            running.append((tick + length, placement.task_id, placement.devices, sizes[placement.lane]))
    pytest.fail("the big task never started")


def _relieved(promise: Promise, ended: list[str]) -> Promise:
    for task_id in ended:
        promise = promise.relieved(task_id)
    return promise
