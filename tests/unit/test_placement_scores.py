"""Scores computed for many candidates at once equal the formulas written out one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from statistics import pstdev

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from brim.core.model import Demand, Device, Node
from brim.core.placement.board import Board
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import UP, capacity_mib, claim_mib, milli, node_shortage, shortage
from brim.core.placement.mix import Mix
from brim.core.placement.outlook import OFFERS, SCARCITY, STEPS
from brim.core.placement.policy import PRESETS, Policy, make_policy
from brim.core.placement.rooms import CPU_GRAIN
from brim.core.placement.trial import NONE
from unit.placement_cases import TASKS, cluster_of, device

GPU = 1000
"""Capacity of every test device in MiB: then a step is one MiB."""

demands = st.builds(
    Demand,
    vram_mib=st.sampled_from([100, 190, 300, 500, 810, GPU]),
    gpus=st.sampled_from([0, 1, 1, 1, 2, 3]),
    cpus=st.sampled_from([0.0, 1.0, 3.0, 8.0]),
    ram_mib=st.sampled_from([0, 0, 600]),
    gpu_models=st.sampled_from([(), (), (), ("A100",), ("T4",)]),
    whole=st.sampled_from([False, False, False, True]),
).map(lambda demand: demand if demand.gpus else Demand(0, gpus=0, cpus=demand.cpus, ram_mib=demand.ram_mib))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    made: list[Device] = []
    nodes: list[Node] = []
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        cpus = draw(st.sampled_from([0.0, 8.0, 16.0]))
        models = draw(st.sampled_from([("A100",), ("T4",), ("A100", "T4")]))
        tasks = draw(st.sampled_from(["all", "all", "none"]))
        nodes.append(Node(name, cpus=cpus, ram_mib=draw(st.sampled_from([0, 1000]))))
        for index in range(draw(st.integers(1, 4))):
            made.append(
                device(
                    name,
                    index,
                    model=models[index % len(models)],
                    total_mib=GPU,
                    headroom_mib=0,
                    committed_mib=draw(st.sampled_from([0, 0, 0, 190, 500, 810, 905, GPU])),
                    external_mib=draw(st.sampled_from([0, 0, 0, 95])),
                    executors=draw(st.sampled_from([2, 4])),
                    busy=draw(st.sampled_from([0, 0, 1, 2])),
                    state=draw(st.sampled_from(["up", "up", "up", "draining"])),
                    tasks=tasks,
                )
            )
    return cluster_of(made, nodes)


# -- the formulas, one site and one choice at a time ------------------------------------------------------------------


class Oracle:
    """The scores of a policy by their definitions."""

    def __init__(self, cluster: Cluster, mix: Mix) -> None:
        covered, self.likely = 0.0, []
        for demand, share in mix.shares():
            if covered >= 0.95:
                break
            self.likely.append((demand, share))
            covered += share
        self.likely = [(demand, share / covered) for demand, share in self.likely]
        self.cluster = cluster

    def need(self, demand: Demand) -> int:
        return GPU if demand.whole else demand.vram_mib

    def open(self, device: Device, least: int) -> bool:
        return device.state == UP and device.busy < device.executors and device.available_mib >= least

    def rooms(self, site: Site, demand: Demand | None = None, least: int = 0) -> list[int]:
        return [
            each.available_mib
            for each in site.devices
            if self.open(each, least)
            and (demand is None or not demand.gpu_models or each.model in demand.gpu_models)
            and (demand is None or each.available_mib >= self.need(demand))
        ]

    def usable(self, site: Site, weights: dict[Demand, float], cpu: int | None) -> float:
        total = 0.0
        for demand, weight in weights.items():
            models = [{"A100"}, {"T4"}] if demand.gpus > 1 else [{"A100", "T4"}]
            for some in models:
                rooms = [
                    each.available_mib
                    for each in site.devices
                    if self.open(each, 0)
                    and each.model in some
                    and (not demand.gpu_models or each.model in demand.gpu_models)
                    and each.available_mib >= self.need(demand)
                ]
                if len(rooms) >= demand.gpus and (cpu is None or milli(demand.cpus) <= cpu):
                    total += weight * sum(rooms)
        return total

    def scarce(self) -> dict[Demand, float]:
        sites = list(self.cluster)
        total = sum(capacity_mib(each) for site in sites for each in site.devices)
        weights = {}
        for demand, share in self.likely:
            able = 0
            for site in sites:
                suited = [
                    each
                    for each in site.devices
                    if capacity_mib(each) >= self.need(demand)
                    and (not demand.gpu_models or each.model in demand.gpu_models)
                ]
                if len(suited) >= demand.gpus and (site.node.cpus == 0 or demand.cpus <= site.node.cpus):
                    able += sum(capacity_mib(each) for each in site.devices)
            if demand.gpus and able:
                weights[demand] = weights.get(demand, 0.0) + share / (able / total) ** SCARCITY
        return weights

    def fill(self) -> Callable[[int], float]:
        asking = [(self.need(demand), share) for demand, share in self.likely if demand.gpus]
        total = sum(share for _, share in asking)

        @cache
        def value(room: int, offers: int = OFFERS) -> float:
            if not offers:
                return 0.0
            before = value(room, offers - 1)
            gains = (
                share / total * max(0.0, need + value(room - need, offers - 1) - before)
                for need, share in asking
                if need <= room
            )
            return before + sum(gains)

        return value


def cpu_seen(site: Site, minus: float = 0.0) -> int | None:
    """The CPU that scores see: whole CPUs before the placement, or None where undeclared."""
    if site.node.cpus == 0:
        return None
    return (milli(site.node.cpus) - milli(site.node.cpus_used)) // CPU_GRAIN * CPU_GRAIN - milli(minus)


def choices(site: Site, demand: Demand, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    if node_shortage(site.node, demand) is not None:
        return
    fitting = [
        position
        for position, each in enumerate(site.devices)
        if shortage(each, demand) is None and cluster.runs(each, "segment")
    ]
    yield from combinations(fitting, demand.gpus)


@given(clusters(), st.lists(demands, min_size=1, max_size=6), st.sampled_from(sorted(PRESETS)))
@settings(max_examples=120, deadline=None, phases=[Phase.generate])
def test_the_board_finds_a_place_exactly_when_there_is_one(cluster, asked, policy):
    mix = Mix.of((demand, 1.0) for demand in asked[:3])
    board = Board(cluster, make_policy(policy), mix)
    for demand in asked:
        board.refresh()
        spot = board.best(board.row(demand, "segment"), demand.ram_mib)
        if spot is None:
            assert not any(True for site in cluster for _ in choices(site, demand, cluster))
        else:
            assert spot.positions in set(choices(cluster[spot.node], demand, cluster))
            cluster.hold(spot.node, spot.positions, demand)


@given(clusters(), st.lists(demands, min_size=2, max_size=6), st.sampled_from(sorted(PRESETS)))
@settings(max_examples=120, deadline=None, phases=[Phase.generate])
def test_a_board_kept_up_to_date_equals_a_fresh_one(cluster, asked, policy):
    mix = Mix.of((demand, 1.0) for demand in asked[:3])
    kept = Board(cluster, make_policy(policy), mix)
    for demand in asked:
        kept.refresh()
        spot = kept.best(kept.row(demand, "segment"), demand.ram_mib)
        fresh = Board(cluster, make_policy(policy), mix)
        assert spot == fresh.best(fresh.row(demand, "segment"), demand.ram_mib)
        if spot is not None:
            cluster.hold(spot.node, spot.positions, demand)


@given(clusters(), st.lists(demands, min_size=2, max_size=8))
@settings(max_examples=200, deadline=None, phases=[Phase.generate])
def test_columns_put_together_from_groups_equal_those_scored_whole(cluster, asked):
    packed, mix = make_policy("packed"), Mix.of((demand, 1.0) for demand in asked[:4])
    whole = Policy("whole", (*packed.scores, ("nothing", 1.0, lambda trial: np.zeros((1, 1)))), packed.resolution)
    together, scored = Board(cluster, packed, mix), Board(cluster, whole, mix)
    for board in (together, scored):
        board.learn((demand, "segment") for demand in asked)
    for demand in asked:
        spots = []
        for board in (together, scored):
            board.refresh()
            spots.append(board.best(board.row(demand, "segment"), demand.ram_mib))
        assert spots[0] == spots[1]
        fits = scored._scores >= NONE
        assert (np.where(fits, together._scores, 0) == np.where(fits, scored._scores, 0)).all()
        assert ((together._scores >= NONE) == fits).all()
        if spots[0] is not None:
            cluster.hold(spots[0].node, spots[0].positions, demand)


@given(clusters(), st.lists(demands, min_size=1, max_size=5), demands)
@settings(max_examples=150, deadline=None, phases=[Phase.generate])
def test_parts_of_scores_follow_their_formulas(cluster, seen, demand):
    mix = Mix.of((each, float(count + 1)) for count, each in enumerate(seen))
    oracle = Oracle(cluster, mix)
    board = Board(cluster, make_policy("packed"), mix)
    balanced = make_policy("balanced")
    fill, scarce = oracle.fill(), oracle.scarce()
    plain = {}
    for each, share in oracle.likely:
        if each.gpus:
            plain[each] = plain.get(each, 0.0) + share
    asked = sum(share * each.gpus * oracle.need(each) for each, share in oracle.likely)
    ratio = sum(share * milli(each.cpus) for each, share in oracle.likely if each.gpus) / asked if asked else 0.0
    row = board.row(demand, "segment")
    for site in cluster:
        trial, reading = board.trial(row, site)
        parts = board.policy.parts(trial) | balanced.parts(trial) | make_policy("fgd").parts(trial)
        for candidate in np.flatnonzero(trial.fits[0]).tolist():
            places = trial.places(0, candidate)
            chosen = tuple(reading.order[at] for at in places)
            after = site.holding(chosen, demand)
            claimed = sum(claim_mib(site.devices[at], demand) for at in chosen)
            least = board._least_mib

            def room(device: Device, least: int = least) -> int:
                return device.available_mib if oracle.open(device, 0) and device.available_mib >= 0 else 0

            lost = sum(fill(room(site.devices[at])) - fill(room(after.devices[at])) for at in chosen)
            assert parts["fill"][0, candidate] == pytest.approx(claimed - lost, abs=1e-6)
            cpu, cpu_after = cpu_seen(site), cpu_seen(site, demand.cpus)
            before_u, after_u = oracle.usable(site, scarce, cpu), oracle.usable(after, scarce, cpu_after)
            assert parts["usable"][0, candidate] == pytest.approx(claimed - (before_u - after_u), abs=1e-6)
            before_u, after_u = oracle.usable(site, plain, cpu), oracle.usable(after, plain, cpu_after)
            gained = claimed - (before_u - after_u)
            assert parts["fgd"][0, candidate] == pytest.approx(100 / (1 + math.exp(-gained / STEPS)))
            if chosen:
                capacity = GPU * len(chosen)
                assert parts["satisfaction"][0, candidate] == pytest.approx(
                    min(1.0, max(0.0, 1 - (before_u - after_u) / capacity)), abs=1e-9
                )
            free = sum(oracle.rooms(site, least=least))
            if ratio and cpu is not None:
                stranded = max(0.0, free - cpu / ratio)
                then = max(0.0, free - claimed - cpu_after / ratio)
                assert parts["unstranded"][0, candidate] == pytest.approx(stranded - then)
            executors = sum(each.executors for each in site.devices)
            busy = sum(each.busy for each in after.devices)
            assert parts["server_load"][0, candidate] == pytest.approx(max(0.0, 1 - busy / executors))
            occupied = [min(1.0, max(0.0, 1 - each.available_mib / GPU)) for each in after.devices]
            if not demand.whole:
                assert parts["memory_balance"][0, candidate] == pytest.approx(1 - 2 * pstdev(occupied), abs=1e-6)


def test_a_task_set_decides_who_is_eligible():
    cluster = cluster_of([device("a", tasks="some"), device("b", tasks="all")])
    board = Board(cluster, make_policy("first-fit"), Mix())
    assert TASKS["some"] == {"segment"}
    train = board.best(board.row(Demand(10), "train"))
    segment = board.best(board.row(Demand(10), "segment"))
    assert (train.node, segment.node) == ("b", "a")
