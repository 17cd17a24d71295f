"""Formulas: what the language has, what it refuses when the table is loaded, and what hostile values meet."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.attributes import EstimateError
from brim.core.formula import MAX_VALUE, Formula, FormulaError, Use

AMOUNTS = st.floats(min_value=0, max_value=1e6)
HOSTILE = st.one_of(
    st.just(math.nan),
    st.just(math.inf),
    st.just(-math.inf),
    st.floats(max_value=-1e-9),
    st.integers(max_value=-1),
    st.integers(min_value=int(MAX_VALUE) + 1),
    st.just(10**5000),
    st.text(),
    st.booleans(),
    st.none(),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.integers()),
)


@pytest.mark.parametrize(
    ("text", "attributes", "expected"),
    [
        ("1200 + 0.00025 * width * height * batch", {"width": 4096, "height": 4096, "batch": 2}, 9588.608),
        ("min(a, 3, b) + max(a, b)", {"a": 5, "b": 2.5}, 7.5),
        ("ceil(a / 4) * 4 + floor(2.9) + round(1.6)", {"a": 5}, 12),
        ("log2(a) ** 2 // 1 % 7", {"a": 8}, 2),
        ("-(-a) + +b", {"a": 1, "b": 2}, 3),
        ("0.02 * len(text) + len(parts)", {"text": "x" * 100, "parts": [1, 2, 3]}, 5),
        ("4000 if model == 'large' else 2000", {"model": "large"}, 4000),
        ("4000 if model != 'large' else 2000", {"model": "large"}, 2000),
        ("100 if half and not tiled else 200", {"half": True, "tiled": False}, 100),
        ("a if 0 < a <= 10 or a > 100 else 0", {"a": 50}, 0),
        ("1 if flag == True else 2", {"flag": True}, 1),
        (" 1 + 1 ", {}, 2),
    ],
)
def test_a_formula_is_arithmetic_over_attributes(text, attributes, expected):
    assert Formula.parse(text).evaluate(attributes) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("1 +", "syntax error"),
        ("a; b", "syntax error"),
        ("a = 1", "syntax error"),
        ("\x00", "cannot be parsed|syntax error"),
        ("open('x')", "unknown function 'open'"),
        ("__import__('os')", "unknown function '__import__'"),
        ("a.__class__", "not part of the formula language"),
        ("a.b(1)", "calls something else"),
        ("a[0]", "not part of the formula language"),
        ("[a for a in b]", "not part of the formula language"),
        ("lambda: 1", "not part of the formula language"),
        ("f'{a}'", "not part of the formula language"),
        ("'x' * 9", "'x'.* not part of the formula language"),
        ("1j", "not part of the formula language"),
        ("True + 1", "not part of the formula language"),
        ("None", "not part of the formula language"),
        ("a << 3", "not part of the formula language"),
        ("a < b", "is a condition"),
        ("(a and b) + 1", "is a condition"),
        ("1 if 'x' in a else 2", "compares by something else"),
        ("1 if 'x' < a else 2", "not part of the formula language"),
        ("1 if a is b else 2", "compares by something else"),
        ("min(a)", "takes two or more arguments"),
        ("log2(a, b)", "takes one argument"),
        ("ceil(x=1)", "takes one argument by position"),
        ("max(*a)", "takes two or more"),
        ("max(a, *b)", "not part of the formula language"),
        ("len(a + b)", "takes the name of an attribute"),
        ("len('text')", "takes the name of an attribute"),
        ("min + 1", "used like an attribute"),
        ("1e999", "too large"),
        ("1 / 0 + a", "cannot be evaluated: .*division by zero"),
        ("3 - 4", "gives -1, which is no amount"),
        ("1e300 * 1e300 + a", "gives inf"),
        ("1" + "0" * 400, "too large"),
        ("-" * 60 + "1", "nested deeper"),
        ("1 if " + "not " * 60 + "a else 2", "nested deeper"),
        ("(" * 300 + "1" + ")" * 300, "syntax error|cannot be parsed"),
        ("1 + " * 400 + "1", "at most 1000 characters"),
    ],
)
def test_the_table_refuses_what_the_language_lacks(text, reason):
    with pytest.raises(FormulaError, match=reason):
        Formula.parse(text)


@given(st.text(max_size=60) | st.text(alphabet="a1+-*/%().,'if else<>=&|~@ ", max_size=60))
def test_any_text_is_a_formula_or_refused_with_a_reason(text):
    try:
        formula = Formula.parse(text)
    except FormulaError as error:
        assert str(error)
    else:
        assert formula.text == text


@given(HOSTILE)
def test_a_hostile_number_is_refused_by_the_attribute_s_name(value):
    formula = Formula.parse("100 + width * height")
    with pytest.raises(EstimateError) as caught:
        formula.evaluate({"width": value, "height": 2})
    assert caught.value.reason.code == "bad_attribute"
    assert "attribute 'width' must be" in caught.value.reason.message
    assert len(caught.value.reason.message) < 200


@given(HOSTILE, st.sampled_from(["len(x)", "1 if x else 2", "1 if x == 3 else 2", "1 if x == 'a' else x"]))
def test_any_value_gives_a_finite_result_or_a_reason(value, text):
    try:
        result = Formula.parse(text).evaluate({"x": value})
    except EstimateError as error:
        assert "'x'" in error.reason.message
    else:
        assert math.isfinite(result)
        assert result >= 0


def test_a_missing_attribute_is_named():
    with pytest.raises(EstimateError, match="attribute 'width' is missing") as caught:
        Formula.parse("10 * width").evaluate({"height": 1})
    assert caught.value.reason.code == "missing_attribute"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10 / width", "division by zero"),
        ("10 % width", "modulo"),
        ("log2(width)", "domain|positive"),
        ("(width - 2) ** 0.5", "domain|not negative|nonneg"),
        ("5 - 10 - width", "negative"),
        ("(width + 1e15) ** 99", "range|large"),
        ("(width + 1e300) * 1e300", "no finite number"),
        ("ceil((width + 1e300) * 1e300)", "infinity"),
    ],
)
def test_arithmetic_that_fails_says_with_which_values(text, reason):
    with pytest.raises(EstimateError, match=reason) as caught:
        Formula.parse(text).evaluate({"width": 0})
    assert caught.value.reason.code == "bad_estimate"
    assert "width=0" in caught.value.reason.message


@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_it_computes_what_python_computes(a, b, c):
    text = "100 + 0.5 * a * b + max(a, c) - min(a, b) + ceil(c) + (a if a > b else b)"
    expected = 100 + 0.5 * a * b + max(a, c) - min(a, b) + math.ceil(c) + max(a, b)
    assert Formula.parse(text).evaluate({"a": a, "b": b, "c": c}) == pytest.approx(expected)


def test_a_formula_tells_what_it_needs():
    formula = Formula.parse("w * 2 + len(text) if mode == 'x' and fast else w")
    assert dict(formula.uses) == {
        "w": Use.NUMBER,
        "text": Use.LENGTH,
        "mode": Use.EQUALITY,
        "fast": Use.CONDITION,
    }


def test_what_it_read_can_be_shown():
    formula = Formula.parse("w + len(text) if mode == 'x' else w")
    assert formula.inputs({"w": 3, "text": "abc", "mode": "y" * 100, "other": 1}) == {
        "w": 3,
        "len(text)": 3,
        "mode": "y" * 59 + "…",
    }


def test_equal_texts_make_equal_formulas():
    assert Formula.parse("1 + a") == Formula.parse("1 + a")
    assert len({Formula.parse("1 + a"), Formula.parse("1 + a")}) == 1
    assert Formula.parse("1 + a") != Formula.parse("a + 1")


@pytest.mark.parametrize(
    ("text", "summands", "rescaled"),
    [
        ("1200 + 0.5 * a * b", (1200, 3), "900 + 1 * a * b"),
        ("a - b * 2 - 3 + 14", (11, 2, -6), "900 + 2 * a - 2 * (b * 2)"),
        ("-(a - 30) + 3 * b", (30, -2, 9), "900 - 2 * a + 6 * b"),
        ("2 * a / 4 + b // 2", (0, 1, 1), "900 + 4 * a / 4 + 2 * (b // 2)"),
        ("4 * max(a, b) ** 2", (0, 36), "900 + 8 * max(a, b) ** 2"),
        ("7 if a > 1.5 else 8", (0, 7), "900 + 2 * (7 if a > 1.5 else 8)"),
        ("1 / a", (0, 0.5), "900 + 2 * (1 / a)"),
        ("42", (42,), "900"),
    ],
)
def test_a_formula_is_a_sum_whose_terms_can_be_rescaled(text, summands, rescaled):
    formula = Formula.parse(text)
    values = {"a": 2, "b": 3}
    assert formula.summands(values) == summands
    assert formula.evaluate(values) == sum(summands)
    assert formula.rescaled(900, [2] * len(formula.terms)).text == rescaled


@given(AMOUNTS, AMOUNTS, st.floats(0, 1e4), st.tuples(*[st.floats(0.01, 10)] * 3))
def test_a_rescaled_formula_computes_the_rescaled_terms(a, b, constant, factors):
    formula = Formula.parse("100 + 0.00025 * a * b + 3 * a / 7 + max(a, b)")
    _, *terms = formula.summands({"a": a, "b": b})
    expected = constant + sum(factor * term for factor, term in zip(factors, terms, strict=True))
    assert formula.rescaled(constant, factors).evaluate({"a": a, "b": b}) == pytest.approx(expected, rel=2e-3, abs=1)
