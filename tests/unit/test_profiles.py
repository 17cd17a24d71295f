"""The resource table: what it refuses and how, demands, size classes and lanes."""

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.attributes import BrimHeader, EstimateError
from brim.core.model import Demand
from brim.core.profiles import (
    MAX_MIB,
    Profile,
    ResourceTable,
    TableError,
    estimate,
    lane_of,
    parse_mib,
    size_class,
)

TABLE = """
defaults:
  context_mib: 400
  margin: 1.5
  defaults: {batch: 1, scale: 2}
  labels: {zone: a}
profiles:
  vision.segment:
    weights_mib: 1GiB
    vram: 1000 + 0.0001 * width * height * batch
    defaults: {scale: 3}
    max_mib: 20GiB
    priority: 4
  vision.*:
    vram: 6GiB
    margin: 1
    gpu_models: [H100, A100]
    labels: {disk: fast}
    cpus: 2
    ram_mib: 3GiB
"""


def table(text=TABLE):
    return ResourceTable.parse(text, "resources.yaml")


def profile(**fields):
    return Profile.model_validate({"name": "t", "context_mib": 0, "margin": 1.0} | fields)


def test_a_row_holds_its_own_fields_over_the_shared_ones():
    segment = table().profile("vision.segment")
    assert (segment.context_mib, segment.weights_mib) == (400, 1024)
    assert (segment.margin, segment.max_mib) == (1.5, 20480)
    assert segment.defaults == {"batch": 1, "scale": 3}
    other = table().profile("vision.other")
    assert (other.name, other.margin, other.labels) == ("vision.*", 1, {"zone": "a", "disk": "fast"})
    assert table().profile("audio.any") is None
    assert [row.name for row in table()] == ["vision.segment", "vision.*"]


def test_a_profile_survives_the_trip_through_json():
    for row in table():
        assert Profile.model_validate_json(row.model_dump_json()) == row


def test_the_demand_is_the_sum_with_the_margin_on_the_formula_alone():
    bound = {"url": "u", "width": 1000, "height": 2000}
    found = estimate(table().profile("vision.segment"), BrimHeader(), bound)
    # 400 + 1024 + 1.5 * (1000 + 200)
    assert sum(part.mib for part in found.parts) == 3224
    assert found.demand == Demand(vram_mib=size_class(3224), labels=(("zone", "a"),))
    assert (found.context_mib, found.priority, found.profile) == (400, 4, "vision.segment")
    assert found.summands == (400 + 1024 + 1000, 200)
    assert found.attributes == {"width": 1000, "height": 2000, "batch": 1}
    assert str(found) == (
        "400 (context) + 1024 (weights) + 1800 (1.5 × 1200 from 1000 + 0.0001 * width * height * batch)"
        " = 3224, reserved 3264 MiB"
    )


def test_the_header_s_attributes_constraints_and_priority_win():
    header = BrimHeader.parse({"attributes": {"batch": 10}, "gpu_model": "L4", "labels": {"zone": "b"}, "priority": 0})
    found = estimate(table().profile("vision.segment"), header, {"width": 1000, "height": 2000, "batch": 2})
    assert sum(part.mib for part in found.parts) == 400 + 1024 + 1.5 * 3000
    assert found.demand.gpu_models == ("L4",)
    assert found.demand.labels == (("zone", "b"),)
    assert found.priority == 0


def test_constraints_and_host_resources_of_a_profile_enter_the_demand():
    found = estimate(table().profile("vision.any"), BrimHeader(), {})
    assert found.demand == Demand(
        vram_mib=6656,
        cpus=2,
        ram_mib=3072,
        gpu_models=("A100", "H100"),
        labels=(("disk", "fast"), ("zone", "a")),
    )


def test_an_explicit_amount_needs_no_profile_and_takes_no_margin():
    header = BrimHeader.parse({"vram_mib": 9000})
    assert estimate(None, header, {}).demand.vram_mib == size_class(9000)
    assert estimate(table().profile("vision.segment"), header, {}).demand.vram_mib == size_class(9000)
    assert estimate(None, BrimHeader.parse({"vram_mib": 100}), {}).context_mib == 112


@pytest.mark.parametrize(
    ("row", "header", "bound", "code", "reason"),
    [
        (None, {}, {}, "no_profile", "no profile.*no vram_mib"),
        ({"vram": "w"}, {}, {}, "missing_attribute", "'w' is missing"),
        ({"vram": "w"}, {}, {"w": "4"}, "bad_attribute", "'w' must be a number"),
        ({"vram": "w", "max_mib": 100}, {}, {"w": 101}, "above_bound", "need 101 MiB, more than .* 100"),
        ({"vram": 1, "max_mib": 100}, {"vram_mib": 101}, {}, "above_bound", "need 101 MiB"),
        ({"vram": "w"}, {}, {"w": 0}, "bad_estimate", "not between 0 and"),
        ({"vram": "w"}, {}, {"w": 1e12}, "bad_estimate", "not between 0 and"),
        ({"vram": "1 / w"}, {}, {"w": 0}, "bad_estimate", "division by zero"),
    ],
)
def test_what_cannot_be_estimated_is_refused_with_a_code(row, header, bound, code, reason):
    with pytest.raises(EstimateError, match=reason) as caught:
        estimate(profile(**row) if row else None, BrimHeader.parse(header), bound)
    assert caught.value.reason.code == code


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{}", "profile 't': field 'vram': Field required"),
        ("3", "profile 't': must be a mapping"),
        ("{vram: 'a.b'}", "profile 't': field 'vram': 'a.b' is not part of the formula language"),
        ("{vram: true}", "profile 't': field 'vram': an amount is"),
        ("{vram: [1]}", "profile 't': field 'vram': an amount is a number of MiB.*not a list"),
        ("{vram: -1}", "profile 't': field 'vram': an amount lies between"),
        ("{vram: 6GB}", "profile 't': field 'vram': .*6GB"),
        ("{vram: 1, context_mib: 6GB}", "profile 't': field 'context_mib': an amount .*'6GB'"),
        ("{vram: 1, context_mib: .nan}", "profile 't': field 'context_mib': an amount lies between"),
        ("{vram: 1, margin: 0.9}", "profile 't': field 'margin'"),
        ("{vram: 1, margin: true}", "profile 't': field 'margin'"),
        ("{vram: 1, gpus: 0}", "profile 't': field 'gpus': Input should be greater than or equal to 1"),
        ("{vram: 1, gpus: 1.5}", "profile 't': field 'gpus'"),
        ("{vram: 1, gpus: many}", "profile 't': field 'gpus'"),
        ("{vram: 1, cpus: .inf}", "profile 't': field 'cpus'"),
        ("{vram: everything, ram_mib: 6GB}", "profile 't': field 'ram_mib': an amount .*'6GB'"),
        ("{model: m, gpus: 2, batch: {max_items: 2}}", "profile 't': batch needs 'gpus: 1'"),
        ("{vram: 1, priority: 10}", "profile 't': field 'priority'"),
        ("{vram: 1, name: x}", "profile 't': field 'name': unknown field"),
        ("{vram: 1, vrma: 1}", "profile 't': field 'vrma': unknown field"),
        ("{vram: 1, defaults: {a: [1]}}", "profile 't': field 'defaults.a': must be a number"),
        ("{vram: 1, max_mib: 100}", r"profile 't': max_mib \(100\) is less than"),
        ("{vram: 1, vram: 2}", "line 2: 'vram' is given twice"),
    ],
)
def test_a_bad_row_is_refused_by_source_profile_field_and_reason(row, problem):
    with pytest.raises(TableError, match=f"^resources.yaml: {problem}"):
        table(f"profiles:\n  t: {row}\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a table is a mapping"),
        ("- 1", "a table is a mapping"),
        ("defaults: {}", "profiles: is missing"),
        ("profiles:", "profiles: must be a mapping"),
        ("{profiles: {}, profile: {}}", "field 'profile': unknown field"),
        ("{profiles: {}, defaults: {vram: 1}}", "defaults: field 'vram': unknown field"),
        ("profiles: {a: {vram: 1}", "line 1: "),
        ("profiles:\n  a: {vram: 1}\n  a: {vram: 2}\n", "line 3: 'a' is given twice"),
        ("profiles: {1: {vram: 1}}", "profile 1: field 'name'"),
        ("\x00", "not readable as YAML"),
    ],
)
def test_a_bad_table_is_refused_by_source_and_place(text, problem):
    with pytest.raises(TableError, match=f"^resources.yaml: {problem}"):
        table(text)


def test_all_problems_are_told_at_once():
    with pytest.raises(TableError) as caught:
        table("defaults: {margin: 0}\nprofiles: {a: {vram: f(1), gpus: 0}, b: 1, c: {vram: 1}}")
    assert [(problem.section, problem.field) for problem in caught.value.problems] == [
        ("defaults", "field 'margin'"),
        ("profile 'a'", "field 'gpus'"),
        ("profile 'a'", "field 'vram'"),
        ("profile 'b'", ""),
    ]


@pytest.mark.parametrize(
    ("value", "mib"),
    [(512, 512), (1.2, 2), ("512MiB", 512), ("6GiB", 6144), (" 1.5 GiB ", 1536), ("1TiB", 1 << 20), (0, 0)],
)
def test_amounts_are_mib_or_texts_with_a_unit(value, mib):
    assert parse_mib(value) == mib


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()))
def test_any_other_amount_is_refused(value):
    try:
        mib = parse_mib(value)
    except ValueError as error:
        assert "an amount" in str(error)
    else:
        assert 0 <= mib <= MAX_MIB


@given(st.floats(min_value=0.001, max_value=MAX_MIB))
def test_a_size_class_is_little_above_the_amount(mib):
    rounded = size_class(mib)
    assert rounded >= mib
    assert rounded <= math.ceil(mib) * 1.032 or rounded - mib < 17
    assert size_class(rounded) == rounded


@given(st.integers(1, MAX_MIB), st.integers(1, MAX_MIB))
def test_size_classes_are_monotone(one, other):
    assert size_class(min(one, other)) <= size_class(max(one, other))


def test_size_classes_are_few():
    classes = sorted({size_class(mib) for mib in range(1, 81920)})
    assert len(classes) < 280
    assert min(b - a for a, b in itertools.pairwise(classes)) == 16


@given(
    st.floats(min_value=0, max_value=1e5),
    st.floats(min_value=0, max_value=1e5),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.floats(min_value=1, max_value=3),
)
def test_a_demand_covers_the_sum_and_grows_with_its_attributes(small, more, context, weights, margin):
    row = profile(vram="1 + 2 * w", context_mib=context, weights_mib=weights, margin=margin)
    demands = [estimate(row, BrimHeader(), {"w": w}).demand.vram_mib for w in (small, small + more)]
    total = context + weights + margin * (1 + 2 * small)
    assert total <= demands[0] <= demands[1]
    assert demands[0] <= max(math.ceil(total) * 1.032, total + 17)


DEMANDS = st.builds(
    Demand,
    vram_mib=st.integers(1, 3),
    gpus=st.integers(1, 2),
    cpus=st.sampled_from([0.0, 1.0]),
    ram_mib=st.integers(0, 1),
    gpu_models=st.sampled_from([(), ("A",), ("A", "B")]),
    labels=st.sampled_from([(), (("a", "b"),)]),
    whole=st.booleans(),
)


@given(DEMANDS, DEMANDS)
def test_lanes_are_equal_exactly_for_equal_demands(one, other):
    assert (lane_of("t", one) == lane_of("t", other)) == (one == other)
    assert lane_of("t", one) != lane_of("u", one)


def test_a_lane_is_readable():
    assert lane_of("vision.segment", Demand(5408)) == "vision.segment|5408MiB"
    assert lane_of("train", Demand(8192, gpus=2)) == "train|2x8192MiB"
    assert lane_of("train", Demand(512, whole=True)).startswith("train|all|")
    assert lane_of("t", Demand(16, gpu_models=("A100",))).startswith("t|16MiB|")


def test_several_gpus_are_demanded_with_the_amount_on_each():
    found = estimate(profile(vram="100 * n", context_mib=400, margin=1.0, gpus=4), BrimHeader(), {"n": 10})
    assert found.demand == Demand(vram_mib=size_class(1400), gpus=4)
    assert str(found).endswith(f"reserved {size_class(1400)} MiB on each of 4 GPUs")


def test_all_of_a_gpu_is_a_whole_one_that_has_room_for_context_and_weights_and_is_not_learned():
    row = profile(vram="all", context_mib=400, weights_mib=900, calibration="on")
    assert row.calibration == "off"
    found = estimate(row, BrimHeader(), {})
    assert found.demand == Demand(vram_mib=size_class(1300), whole=True)
    assert str(found) == "400 (context) + 900 (weights) = at least 1300, reserved a whole GPU"
    assert Profile.model_validate_json(row.model_dump_json()) == row


def test_a_whole_gpu_may_have_to_have_an_amount():
    found = estimate(profile(vram="20GiB", context_mib=0, margin=1.0, whole=True, gpus=2), BrimHeader(), {})
    assert (found.demand.vram_mib, found.demand.gpus, found.demand.whole) == (20480, 2, True)


def test_a_header_takes_the_place_of_what_the_profile_demands():
    row = profile(vram="all", gpus=2, cpus=4, ram_mib="1GiB")
    header = BrimHeader(vram_mib=9000, gpus=1, cpus=0.5, ram_mib=0)
    assert estimate(row, header, {}).demand == Demand(size_class(9000), gpus=1, cpus=0.5)
    asked = estimate(profile(vram=1, context_mib=300), BrimHeader(vram_mib="all"), {}).demand
    assert asked == Demand(size_class(300), whole=True)
    assert estimate(None, BrimHeader(vram_mib="all", gpus=8), {}).demand == Demand(512, gpus=8, whole=True)


def test_an_item_that_no_batch_can_hold_is_refused():
    row = profile(model="m", batch={"max_items": 4, "volume": "len(text)", "max_volume": 10, "per_unit_mib": 1})
    found = estimate(row, BrimHeader(), {"text": "x" * 10})
    assert found.batched is not None
    assert found.batched.size == 10
    with pytest.raises(EstimateError, match=r"its volume is 11, .* batch\.max_volume, 10 .*above_bound"):
        estimate(row, BrimHeader(), {"text": "x" * 11})


def test_a_batched_task_keeps_to_its_executors_gpu():
    row = profile(model="m", context_mib=300, batch={"max_items": 4})
    assert estimate(row, BrimHeader(gpus=1), {}).demand.gpus == 1
    with pytest.raises(EstimateError, match=r"field 'gpus': .* is batched"):
        estimate(row, BrimHeader(gpus=2), {})


def test_the_example_table_gives_typical_amounts():
    text = (Path(__file__).parents[2] / "configs" / "resources.yaml").read_text()
    example = ResourceTable.parse(text, "configs/resources.yaml")
    needs = {
        task: estimate(example.profile(task), BrimHeader(), bound).demand.vram_mib
        for task, bound in {
            "vision.segment": {"width": 4096, "height": 4096},
            "vision.detect": {"width": 1280, "height": 1280},
            "vision.caption": {"max_tokens": 512},
            "vision.upscale": {"width": 1536, "height": 1536, "factor": 2},
            "vision.embed": {"text": "a sentence"},
        }.items()
    }
    assert all(1536 <= mib <= 14 * 1024 for mib in needs.values()), needs
    assert example.profile("vision.thumbnail") is None
    assert example.profile("vision.notify") is None
