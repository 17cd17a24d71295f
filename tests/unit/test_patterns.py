"""Names and globs: which pattern speaks for a task."""

import itertools

import pytest

from brim.core.patterns import best_match, is_glob


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("vision.segment", "vision.segment"),
        ("vision.segment.fast", "vision.segment*"),
        ("vision.upscale", "vision.*"),
        ("audio.detect", "*.detect"),
        ("audio.other", "*"),
        ("vision.[x]", "vision.[x]"),
    ],
)
def test_the_exact_name_wins_then_the_most_specific_glob(task, expected):
    patterns = ["*", "*.detect", "vision.*", "vision.segment*", "vision.segment", "vision.[x]"]
    for order in itertools.permutations(patterns):
        assert best_match(task, order) == expected


def test_names_are_matched_by_case_and_may_match_nothing():
    assert best_match("Vision.x", ["vision.*"]) is None


def test_fewer_wildcards_break_a_tie():
    assert best_match("abcd", ["a*c*", "*cd", "ab*", "abc*"]) == "abc*"
    assert best_match("abc", ["a**", "a*"]) == "a*"


def test_a_glob_has_wildcards():
    assert [name for name in ("a.b", "a.*", "a.?", "a.[bc]") if is_glob(name)] == ["a.*", "a.?", "a.[bc]"]
