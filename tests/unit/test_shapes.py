"""From measurements to a formula: given what a task used at some sizes, then the simplest formula that says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.shapes import shape_of


def measured(need, **varied):
    names, values = list(varied), list(varied.values())
    return [
        (dict(zip(names, combination, strict=True)), need(*combination)) for combination in zip(*values, strict=True)
    ]


def test_one_measurement_is_a_constant():
    assert str(shape_of([({"n": 3.0}, 812.0)]).formula) == "812"


@pytest.mark.parametrize(
    ("need", "formula"),
    [
        (lambda w, h: 600.0, "600"),
        (lambda w, h: 600 + 0.5 * w, "600 + 0.5 * w"),
        (lambda w, h: 600 + 0.001 * w * h, "600 + 0.001 * w * h"),
        (lambda w, h: 100 + 0.002 * h * h, "100 + 0.002 * h * h"),
        (lambda w, h: 2 * w, "2 * w"),
    ],
)
def test_the_simplest_formula_that_explains_all_of_it(need, formula):
    sizes = {"w": [512.0, 1024.0, 512.0, 2048.0, 1024.0], "h": [512.0, 512.0, 2048.0, 1024.0, 4096.0]}
    found = shape_of(measured(need, **sizes))
    assert str(found.formula) == formula
    assert found.error < 0.01


def test_noise_is_told_as_error_and_makes_nothing_complicated():
    noise = iter([1.01, 0.99, 1.01, 0.99])
    found = shape_of(measured(lambda n: (300 + 2 * n) * next(noise), n=[100.0, 200.0, 400.0, 800.0]))
    assert str(found.formula).endswith("* n")
    assert 0.001 < found.error < 0.03


def test_what_shrinks_with_an_attribute_is_a_constant_that_suffices():
    found = shape_of(measured(lambda n: 1000 - n, n=[100.0, 300.0, 500.0]))
    assert str(found.formula) == "900"


@given(
    constant=st.integers(0, 5000),
    slope=st.floats(0.01, 100),
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=8, unique=True),
)
def test_a_line_is_always_found(constant, slope, sizes):
    found = shape_of(measured(lambda n: constant + slope * n, n=[float(size) for size in sizes]))
    for size in sizes:
        truth = constant + slope * size
        assert abs(found.formula.evaluate({"n": size}) - truth) <= 0.03 * truth + 1
