"""Batch profiles: what they refuse, keys, limits, and the memory of model executors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.attributes import BrimHeader, EstimateError
from brim.core.batching import cut
from brim.core.batching.sizing import footprint, limits_of
from brim.core.profiles import BatchProfile, Profile, ResourceTable, TableError, estimate

TABLE = """
profiles:
  embed:
    model: bert
    version: "2"
    context_mib: 400
    weights_mib: 1200
    margin: 1.5
    batch: {max_items: 32, max_volume: 4096, volume: len(text), per_unit_mib: 0.25, shape_bucket: ceil(log2(len(text)))}
"""


def profile(text: str = TABLE) -> Profile:
    return next(iter(ResourceTable.parse(text, "resources.yaml")))


def counted(**batch: object) -> Profile:
    """A profile without a volume formula."""
    fields = {"name": "t", "model": "m", "context_mib": 100, "margin": 1.0, "batch": {"max_items": 8} | batch}
    return Profile.model_validate(fields)


class TestBatchProfile:
    def test_an_item_alone_is_what_a_task_is_estimated_at(self):
        asked = estimate(profile(), BrimHeader(), {"text": "x" * 1024})
        assert sum(part.mib for part in asked.parts) == 400 + 1200 + 1.5 * 0.25 * 1024

    def test_an_item_that_no_executor_could_have_the_memory_for_is_refused_by_max_mib(self):
        row = Profile.model_validate(profile().model_dump() | {"max_mib": 1700})
        with pytest.raises(EstimateError, match="above_bound"):
            estimate(row, BrimHeader(), {"text": "x" * 1024})

    def test_survives_the_way_through_json(self):
        assert Profile.model_validate_json(profile().model_dump_json()) == profile()
        assert Profile(name="t", model="m", batch=BatchProfile(max_items=2)).vram.text == "0 * (1)"

    def test_a_batched_task_cannot_ask_for_memory_of_its_own(self):
        with pytest.raises(EstimateError, match="vram_mib"):
            estimate(profile(), BrimHeader(vram_mib=100), {"text": "x"})

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("{batch: {max_items: 4}}", "batch needs 'model'"),
            ("{model: m, vram: 3, batch: {max_items: 4}}", "batch and vram exclude each other"),
            ("{model: m, vram: 3}", "which is missing"),
            ("{model: m, batch: {max_items: 0}}", "field 'batch.max_items'"),
            ("{model: m, batch: {max_items: 1, volume: 'f('}}", "field 'batch.volume'"),
            ("{model: m, batch: {max_items: 1, volume: n, per_unit_mib: 1}}", "max_volume is missing"),
            ("{model: m, batch: 7}", "field 'batch'"),
            ("{model: m, batch: {max_items: 1, flush_every: 3}}", "field 'batch.flush_every': unknown field"),
        ],
    )
    def test_names_what_is_wrong(self, row, message):
        with pytest.raises(TableError) as error:
            profile(f"profiles: {{t: {row}}}")
        assert message in str(error.value)


class TestFootprint:
    def test_nothing_waiting_still_says_what_a_full_batch_takes(self):
        assert footprint(profile(), []).full_mib == 3136  # 400 + 1200 + 1.5 × 0.25 × 4096

    def test_is_useful_when_it_bears_all_that_waits(self):
        need = footprint(profile(), [100.0, 100.0])
        assert (need.alone_mib, need.least_mib) == (1664, 1696)  # 1637.5 and 1675 in their classes

    def test_or_a_quarter_of_a_full_batch(self):
        assert footprint(profile(), [128.0] * 32).least_mib == 1984

    def test_but_never_less_than_the_largest_item(self):
        assert footprint(profile(), [4000.0]).least_mib == footprint(profile(), [4000.0]).alone_mib

    def test_without_memory_per_unit_context_and_weights_are_all(self):
        need = footprint(counted(), [1.0])
        assert need.alone_mib == need.least_mib == need.full_mib == 112

    def test_counted_items_are_bounded_by_max_items(self):
        assert footprint(counted(per_unit_mib=50.0), [1.0]).full_mib == 512  # 100 + 8 × 50

    @given(st.lists(st.floats(1, 4096), max_size=50))
    def test_each_reservation_bears_what_it_is_for(self, sizes):
        need = footprint(profile(), sizes)
        assert need.alone_mib <= need.least_mib <= need.full_mib
        for vram_mib in (need.alone_mib, need.least_mib, need.full_mib):
            if vram_mib > 1600:
                limits = limits_of(profile(), vram_mib)
                assert all(limits.shortage(cut([size], limits)[0]) is None for size in sizes)

    def test_limits_count_the_margin(self):
        limits = limits_of(profile(), 3136, ceiling=5.0)
        assert (limits.per_unit_mib, limits.reservation_mib, limits.ceiling) == (0.375, 1536, 5.0)
        assert limits_of(counted(), 112).reservation_mib == math.inf


def test_a_model_in_one_version_has_one_profile():
    text = """
profiles:
  a: {model: m, batch: {max_items: 2}}
  b: {model: m, version: "2", batch: {max_items: 2}}
  c: {model: m, batch: {max_items: 4}}
"""
    with pytest.raises(TableError, match=r"profile 'c': field 'model': profile 'a' has this model and version already"):
        ResourceTable.parse(text, "table")


class TestEstimate:
    def test_says_what_a_task_is_batched_by(self):
        found = estimate(profile(), BrimHeader(), {"text": "x" * 33}).batched
        assert found is not None
        assert (found.model, found.version, found.shape, found.size) == ("bert", "2", "6", 33.0)
        assert found.lane("embed") == "embed|batch|bert@2|6"

    def test_has_no_shape_without_a_bucket(self):
        found = estimate(counted(), BrimHeader(), {}).batched
        assert found is not None
        assert (found.shape, found.lane("t")) == ("", "t|batch|m")

    def test_tasks_that_are_not_batched_have_none(self):
        assert estimate(Profile.model_validate({"name": "t", "vram": 1}), BrimHeader(), {}).batched is None

    @pytest.mark.parametrize("header", [{"vram_mib": 1}, {"gpu_model": "L4"}, {"labels": {"zone": "a"}}])
    def test_a_header_cannot_say_where_a_batched_task_runs(self, header):
        with pytest.raises(EstimateError, match="bad_header"):
            estimate(profile(), BrimHeader.model_validate(header), {"text": "x"})
