"""`brim explain` says what decides: the candidates of the board, their parts, and the fit rule's reasons."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.model import Demand
from brim.core.placement import PRESETS, Mix, explain, make_policy, node_shortage, shortage
from brim.core.placement.board import Board
from unit.placement_cases import GIB, cluster_of, demands, device, devices, nodes


@given(devices(), nodes(), demands, st.sampled_from(sorted(PRESETS)))
@settings(max_examples=40, deadline=None)
def test_the_first_candidate_is_the_choice_and_every_node_is_either_candidate_or_out(made, servers, demand, policy):
    cluster = cluster_of(made, servers)
    mix = Mix.of([(demand, 1.0)])
    found = explain(cluster, make_policy(policy), mix, demand, "segment")
    board = Board(cluster, make_policy(policy), mix)
    spot = board.best(board.row(demand, "segment"), demand.ram_mib)
    assert bool(found.candidates) == (spot is not None)
    if spot is not None:
        uuids = tuple(cluster[spot.node].devices[position].uuid for position in spot.positions)
        assert (found.candidates[0].node, found.candidates[0].devices) == (spot.node, uuids)
    for candidate in found.candidates:
        assert sum(candidate.parts.values()) == pytest.approx(candidate.score)
        assert node_shortage(cluster[candidate.node].node, demand) is None
        assert all(shortage(cluster.device(uuid), demand) is None for uuid in candidate.devices)
    able = {candidate.node for candidate in found.candidates}
    assert able.isdisjoint(out.node for out in found.out)
    assert able | {out.node for out in found.out} == {site.name for site in cluster}
    assert all(out.reason.code and out.reason.message for out in found.out)


def test_nodes_that_are_out_come_by_how_near_they_are():
    made = [
        device("a", tasks="none"),
        device("b", model="T4"),
        device("c", committed_mib=22 * GIB),
        device("d", busy=4),
    ]
    demand = Demand(4 * GIB, gpu_models=("A100",))
    found = explain(cluster_of(made), make_policy("balanced"), Mix(), demand, "segment")
    assert [(out.node, out.reason.code) for out in found.out] == [
        ("d", "executors"),
        ("c", "memory"),
        ("b", "model"),
        ("a", "no_worker"),
    ]
    assert found.candidates == []


def test_devices_that_are_alike_stand_once():
    found = explain(
        cluster_of([device("a", at) for at in range(3)]), make_policy("packed"), Mix(), Demand(10), "segment"
    )
    assert [(candidate.devices, candidate.alike) for candidate in found.candidates] == [(("GPU-a-0",), 3)]
