"""Attributes: signatures, binding, headers, and which source of a value wins."""

import functools
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from brim.core.attributes import BrimHeader, EstimateError, TaskSignature, merge_attributes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def segment(url, *, width, height, batch=1, out=None): ...


def published(function, **options):
    """The signature as intake gets it: through JSON."""
    signature = TaskSignature.from_callable(function, **options)
    return TaskSignature.model_validate_json(signature.model_dump_json())


def test_arguments_get_the_names_that_the_function_gives_them():
    bound = published(segment).bind("vision.segment", ["s3://x"], {"width": 3, "height": 4})
    assert bound == {"url": "s3://x", "width": 3, "height": 4, "batch": 1, "out": None}


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        (["u"], {"height": 4}, "missing.*'width'"),
        ([], {"width": 3, "height": 4}, "missing.*'url'"),
        (["u", 3, 4], {}, "too many positional"),
        (["u"], {"width": 3, "height": 4, "depth": 5}, "unexpected keyword argument 'depth'"),
        (["u"], {"url": "v", "width": 3, "height": 4}, "multiple values for argument 'url'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_with_the_signature(args, kwargs, reason):
    with pytest.raises(EstimateError, match=reason) as caught:
        published(segment).bind("vision.segment", args, kwargs)
    assert caught.value.reason.code == "unbindable_arguments"
    assert "vision.segment(url, *, width, height, batch=1, out=None)" in caught.value.reason.message


def test_variable_arguments_keep_their_names():
    def task(first, /, *rest, key=2, **more): ...

    bound = published(task).bind("t", [1, 2, 3], {"width": 5})
    assert bound == {"first": 1, "rest": (2, 3), "key": 2, "width": 5}


def test_a_bound_task_s_own_parameter_is_left_out():
    def task(self, width): ...

    class Owner:
        run = task

    assert published(task, bound=True) == published(Owner().run)
    assert published(task, bound=True).bind("t", [7], {}) == {"width": 7}


def test_a_wrapped_function_is_read_through():
    @functools.wraps(segment)
    def wrapper(*args, **kwargs): ...

    assert published(wrapper) == published(segment)


def test_a_default_that_json_cannot_carry_counts_as_none():
    def task(a=object(), b=float("nan"), c=(1, 2)): ...  # noqa: B008

    assert published(task).bind("t", [], {}) == {"a": None, "b": None, "c": [1, 2]}


@pytest.mark.parametrize(
    "parameters",
    [
        [{"name": "a", "kind": "keyword_only"}, {"name": "a", "kind": "keyword_only"}],
        [{"name": "a", "kind": "keyword_only"}, {"name": "b", "kind": "positional_only"}],
        [{"name": "1", "kind": "keyword_only"}],
        [{"name": "a", "kind": "magic"}],
    ],
)
def test_a_published_signature_that_no_function_has_is_refused(parameters):
    with pytest.raises(ValidationError):
        TaskSignature.model_validate({"parameters": parameters})


def of_every_kind(a, b=1, *rest, c, d=2, **more):
    return more | {"a": a, "b": b, "rest": rest, "c": c, "d": d}


def of_one_kind(a, b, c=1, d=2):
    return {"a": a, "b": b, "c": c, "d": d}


@given(
    st.sampled_from([of_every_kind, of_one_kind]),
    st.lists(JSON, max_size=5),
    st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e"]) | st.text(), JSON, max_size=4),
)
def test_binding_agrees_with_the_call(call, args, kwargs):
    try:
        expected = call(*args, **kwargs)
    except TypeError:
        with pytest.raises(EstimateError):
            published(call).bind("t", args, kwargs)
    else:
        assert published(call).bind("t", args, kwargs) == expected


def test_a_header_says_what_the_producer_knows():
    raw = {"attributes": {"batch": 8, "half": True}, "vram_mib": 9000, "gpu_model": "A100"}
    header = BrimHeader.parse(raw)
    assert header.attributes == {"batch": 8, "half": True}
    assert header.attributes["half"] is True
    assert (header.vram_mib, header.gpu_model, header.priority, header.labels) == (9000, "A100", None, {})
    many = BrimHeader.parse({"vram_mib": "all", "gpus": 2, "cpus": 1.5, "ram_mib": 4096})
    assert (many.vram_mib, many.gpus, many.cpus, many.ram_mib) == ("all", 2, 1.5, 4096)
    assert BrimHeader.parse(None) == BrimHeader.parse({}) == BrimHeader()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("text", "the whole value"),
        ({"vrm_mib": 3}, "field 'vrm_mib': unknown field"),
        ({"vram_mib": -1}, "field 'vram_mib'"),
        ({"vram_mib": True}, "field 'vram_mib'"),
        ({"vram_mib": 1.5}, "field 'vram_mib'"),
        ({"vram_mib": "most"}, "field 'vram_mib': must be a number of MiB from 1 to .*, or 'all'"),
        ({"gpus": 0}, "field 'gpus'"),
        ({"gpus": "2"}, "field 'gpus'"),
        ({"cpus": -1}, "field 'cpus'"),
        ({"ram_mib": 1.5}, "field 'ram_mib'"),
        ({"attributes": {"a": [1]}}, r"field 'attributes.a': must be a number, a text or a flag, not a list"),
        ({"attributes": {"a b": 1}}, "field 'attributes.a b"),
        ({"attributes": {f"a{n}": 1 for n in range(65)}}, "field 'attributes'"),
        ({"labels": {"zone": 1}}, "field 'labels.zone'"),
        ({"priority": 10}, "field 'priority'"),
        ({"gpu_model": ""}, "field 'gpu_model'"),
    ],
)
def test_a_bad_header_is_refused_by_field(raw, reason):
    with pytest.raises(EstimateError, match=reason) as caught:
        BrimHeader.parse(raw)
    assert caught.value.reason.code == "bad_header"


@given(JSON)
def test_any_json_is_a_header_or_a_reason(raw):
    try:
        BrimHeader.parse(raw)
    except EstimateError as error:
        assert "header 'brim'" in error.reason.message


def test_the_header_wins_over_arguments_and_these_over_defaults():
    merged = merge_attributes(
        {"width": 1, "scale": None, "url": "u"}, {"width": 2}, {"width": 3, "scale": 4, "batch": 5}
    )
    assert merged == {"width": 2, "scale": 4, "url": "u", "batch": 5}


def test_an_error_survives_the_way_between_processes():
    with pytest.raises(EstimateError) as caught:
        BrimHeader.parse("x")
    assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason


def test_signatures_are_small_json():
    text = TaskSignature.from_callable(segment).model_dump_json(exclude_defaults=True)
    assert json.loads(text)["parameters"][0] == {"name": "url", "kind": "positional_or_keyword"}
