"""Reasons and promises found for all sites at once equal those found site by site (invariant 6)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.model import Reason
from brim.core.placement.survey import Survey, miss
from unit.placement_cases import cluster_of, demands, devices, nodes


@given(devices(), nodes(), demands, st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_reason_is_that_of_the_place_which_comes_nearest(made, servers, demand, memory):
    cluster = cluster_of(made, servers)
    misses = [
        miss(cluster, site, demand, "segment", memory=memory)
        for site in cluster
        if any(cluster.runs(device, "segment") for device in site.devices)
    ]
    reason = Survey(cluster).why(demand, "segment", memory=memory)
    if not misses:
        assert isinstance(reason, Reason)
        assert reason.code == "no_worker"
    else:
        nearest = min(misses, key=lambda each: (each.rank, each.amount)).reason
        assert reason == nearest or (nearest is None and isinstance(reason, str))


@given(st.lists(devices(), min_size=2, max_size=2), demands)
@settings(max_examples=50, deadline=None)
def test_a_survey_kept_up_to_date_equals_a_fresh_one(stages, demand):
    cluster = cluster_of(stages[0])
    kept = Survey(cluster)
    kept.why(demand, "segment")
    for device in stages[1]:
        cluster.update(device)
    fresh = Survey(cluster)
    assert kept.why(demand, "segment") == fresh.why(demand, "segment")
    assert kept.nearest(demand, "segment", (), 100.0) == fresh.nearest(demand, "segment", (), 100.0)
    assert kept.recyclable(demand, "segment", None) == fresh.recyclable(demand, "segment", None)


@given(devices(), nodes(), demands)
@settings(max_examples=100, deadline=None)
def test_what_is_promised_will_hold_the_demand_once_it_is_drained(made, servers, demand):
    cluster = cluster_of(made, servers)
    found = Survey(cluster).nearest(demand, "segment", (), 100.0)
    if found is None:
        return
    site, positions = found
    assert len(set(positions)) == demand.gpus
    for position in positions:
        device = site.devices[position]
        assert cluster.runs(device, "segment")
        assert device.total_mib - device.headroom_mib - device.external_mib >= demand.vram_mib
