"""Scatter and fit: accuracy, few samples, outliers."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.robust import ACCURACY, Scatter, fit

RATIOS = st.lists(st.floats(0.1, 10), min_size=1, max_size=60)


def scatter_of(ratios):
    scatter = Scatter()
    for ratio in ratios:
        scatter.add(ratio)
    return scatter


@given(RATIOS, st.floats(0, 1))
def test_a_quantile_is_accurate_to_its_own_size(ratios, rank):
    exact = float(np.quantile(ratios, rank, method="lower"))
    higher = float(np.quantile(ratios, rank, method="higher"))
    assert exact * (1 - ACCURACY) * 0.999 <= scatter_of(ratios).at(rank) <= higher * (1 + ACCURACY) * 1.001


@given(RATIOS)
def test_a_sketch_survives_the_trip_through_json(ratios):
    scatter = scatter_of(ratios)
    again = Scatter(scatter.to_json())
    assert len(again) == len(ratios)
    assert [again.at(rank) for rank in (0, 0.5, 1)] == [scatter.at(rank) for rank in (0, 0.5, 1)]
    assert again.exceeded_by(0.002) == scatter.exceeded_by(0.002)


def test_nothing_is_known_of_no_ratios():
    with pytest.raises(ValueError, match="nothing has been counted"):
        Scatter().at(0.5)


@given(st.integers(3, 400), st.floats(0.2, 5))
def test_equal_ratios_need_no_more_than_themselves(count, ratio):
    assert ratio <= scatter_of([ratio] * count).exceeded_by(0.002) <= ratio * (1 + 3 * ACCURACY)


@given(st.integers(20, 300), st.integers(0, 1000), st.floats(1, 100))
def test_two_outliers_hardly_move_it(count, seed, size):
    """By a tenth at most from about forty ratios on; below thirty a rank that they push aside may be a gap's edge."""
    random = Random(seed)
    scatter = scatter_of(math.exp(random.gauss(0, 0.05)) for _ in range(count))
    before = scatter.exceeded_by(0.002)
    for _ in range(2):
        scatter.add(size * before)
    assert scatter.exceeded_by(0.002) <= before * (1.15 if count >= 40 else 1.2 if count >= 30 else 1.35)


@pytest.mark.parametrize("count", [20, 50, 200, 1000, 3000])
def test_few_of_what_comes_exceed_it_and_it_is_not_far_above(count):
    random = Random(count)
    exceeded = []
    factors = []
    for _ in range(60):
        factor = scatter_of(math.exp(random.gauss(0, 0.05)) for _ in range(count)).exceeded_by(0.002)
        factors.append(factor)
        exceeded.append(0.5 * math.erfc(math.log(factor) / 0.05 / math.sqrt(2)))
    assert sum(exceeded) / len(exceeded) <= 0.002 if count > 20 else 0.005
    assert sum(factors) / len(factors) <= 1.35


def test_what_more_than_the_share_has_reached_is_the_least():
    scatter = scatter_of([1.0] * 2000 + [2.0] * 5)
    assert scatter.exceeded_by(0.002) >= 2.0
    assert scatter_of([1.0] * 2000 + [2.0] * 4).exceeded_by(0.002) < 1.1


@given(
    st.integers(0, 10_000),
    st.lists(st.floats(0.3, 4), min_size=2, max_size=4),
)
def test_a_fit_finds_the_weights_of_the_summands(seed, weights):
    random = np.random.default_rng(seed)
    shares = random.dirichlet([1.0] * len(weights), size=100)
    ratios = shares @ np.array(weights) * np.exp(random.normal(0, 0.02, 100))
    ratios[:5] *= 4
    assert shares @ fit(shares, ratios) == pytest.approx(shares @ np.array(weights), rel=0.12)


def test_tasks_of_one_size_scale_every_summand_alike():
    shares = np.tile([0.2, 0.8], (30, 1))
    assert fit(shares, np.full(30, 1.7)) == pytest.approx([1.7, 1.7], rel=1e-3)


def test_no_summand_weighs_less_than_nothing():
    shares = np.array([[share, 1 - share] for share in np.linspace(0.3, 0.7, 30)])
    found = fit(shares, 2 - 2.5 * shares[:, 0])
    assert found.min() >= 0
