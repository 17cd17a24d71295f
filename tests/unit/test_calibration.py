"""Calibration: what it promises, whatever peaks come in."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bench_calibration import kinds, simulate
from brim.core.attributes import BrimHeader
from brim.core.calibration import HIGHEST, LOWEST, MIN_SAMPLES, RECENT, Calibration, Sample
from brim.core.profiles import Profile, estimate

PROFILE = Profile.model_validate(
    {"name": "t", "context_mib": 400, "weights_mib": 600, "vram": "200 + 0.5 * w", "calibration": "on", "margin": 1.3}
)
TYPICAL = (1200.0, 1000.0)
"""The summands of a typical task: fixed part, term."""

SUMMANDS = st.tuples(st.just(1200.0), st.floats(10, 20_000))
SAMPLES = st.lists(
    st.builds(
        lambda number, summands, ratio, ran_out, model: Sample(
            f"t{number}", model, summands, ratio * sum(summands), ran_out
        ),
        st.integers(0, 60),
        SUMMANDS,
        st.floats(0.2, 6),
        st.sampled_from([False, False, False, True]),
        st.sampled_from(["A100", "L4"]),
    ),
    max_size=80,
)


def declared_mib(summands):
    return 1000 + PROFILE.margin * (sum(summands) - 1000)


def reserved(calibration, summands=TYPICAL, models=()):
    """What would be reserved: the learned amount, or the declared one while nothing is learned."""
    declared = declared_mib(summands)
    found = calibration.reserve_mib(summands, declared, models)
    return declared if found is None else found


def taught(samples, profile=PROFILE):
    calibration = Calibration(profile)
    for sample in samples:
        calibration.learn(sample)
    return calibration


def steady(count, factor=1.0, seed=1, scatter=0.04, start=0):
    """Tasks of many sizes that need ``factor`` times the declared need, give or take."""
    random = Random(seed)
    for number in range(start, start + count):
        summands = (1200.0, random.uniform(200, 4000))
        peak_mib = sum(summands) * factor * math.exp(random.gauss(0, scatter))
        yield Sample(f"s{number}", "A100", summands, peak_mib)


@settings(max_examples=60, deadline=None)
@given(SAMPLES, SUMMANDS)
def test_an_amount_stays_within_its_bounds(samples, summands):
    found = taught(samples).reserve_mib(summands, declared_mib(summands), ())
    if found is not None:
        need = sum(summands)
        assert found >= PROFILE.context_mib + PROFILE.weights_mib
        assert LOWEST * need * 0.999 <= found <= HIGHEST * need * 1.001


@settings(max_examples=60, deadline=None)
@given(SAMPLES, SUMMANDS, SUMMANDS, st.floats(0.2, 6), st.sampled_from(["t1", "new"]))
def test_running_out_of_memory_never_lowers_an_estimate(samples, summands, other, ratio, task_id):
    calibration = taught(samples)
    before = reserved(calibration, other)
    calibration.learn(Sample(task_id, "A100", summands, ratio * sum(summands), out_of_memory=True))
    assert reserved(calibration, other) >= before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.2, 6), max_size=MIN_SAMPLES - 1), st.floats(1, 3), st.data())
def test_few_samples_only_raise_and_a_higher_peak_never_lowers(ratios, growth, data):
    samples = [Sample(f"t{n}", "A100", TYPICAL, ratio * sum(TYPICAL)) for n, ratio in enumerate(ratios)]
    before = reserved(taught(samples))
    assert before >= declared_mib(TYPICAL)
    if samples:
        chosen = data.draw(st.integers(0, len(samples) - 1))
        samples[chosen] = replace(samples[chosen], peak_mib=samples[chosen].peak_mib * growth)
    assert reserved(taught(samples)) >= before


@settings(max_examples=30, deadline=None)
@given(st.integers(MIN_SAMPLES, 200), st.integers(0, 100), st.floats(0.6, 2))
def test_what_is_reserved_grows_with_all_peaks_alike(count, seed, factor):
    once = reserved(taught(steady(count, 1.0, seed)))
    scaled = reserved(taught(steady(count, factor, seed)))
    assert scaled == pytest.approx(max(once * factor, 1000), rel=0.03)


@settings(max_examples=30, deadline=None)
@given(st.integers(MIN_SAMPLES, 200), st.integers(0, 100), st.floats(1.5, 20), st.booleans())
def test_a_single_outlier_does_not_move_it(count, seed, size, ran_out):
    first, following = list(steady(count, 1.2, seed)), list(steady(1, 1.2, seed + 1, start=count))
    outlier = Sample("outlier", "A100", TYPICAL, sum(TYPICAL) * size, ran_out)
    without = reserved(taught([*first, *following]))
    assert reserved(taught([*first, outlier, *following])) == pytest.approx(without, rel=0.15)


@settings(max_examples=20, deadline=None)
@given(st.integers(2 * MIN_SAMPLES, 300), st.integers(0, 100), st.floats(1.25, 2))
def test_a_drift_is_noticed_within_twenty_tasks_and_lowers_nothing(count, seed, growth):
    calibration = taught(steady(count, 1.0, seed))
    before = reserved(calibration)
    for sample in steady(RECENT, growth, seed + 1, start=count):
        calibration.learn(sample)
        assert reserved(calibration) >= before * 0.93
    assert reserved(calibration) >= growth * sum(TYPICAL)


def test_a_drift_that_only_shows_by_running_out_of_memory_is_noticed():
    calibration = taught(steady(100))
    before = reserved(calibration)
    for number in range(RECENT):
        peak_mib = reserved(calibration) * 1.01
        calibration.learn(Sample(f"o{number}", "A100", TYPICAL, peak_mib, out_of_memory=True))
    assert reserved(calibration) > before * 1.05


def test_attempts_of_one_task_count_as_one():
    calibration = Calibration(PROFILE)
    for attempt in range(10):
        calibration.learn(Sample("same", "A100", TYPICAL, 9000 + attempt, out_of_memory=True))
    assert calibration.reserve_mib(TYPICAL, declared_mib(TYPICAL), ()) is None


def test_needs_that_shrink_lower_the_estimate_slowly():
    calibration = taught(steady(300, 1.5))
    before = reserved(calibration)
    for sample in steady(30, 0.9, start=300):
        calibration.learn(sample)
    assert reserved(calibration) > before * 0.8
    for sample in steady(300, 0.9, start=400):
        calibration.learn(sample)
    assert reserved(calibration) < before * 0.75


def test_single_coefficients_are_learned_and_carry_to_other_sizes():
    random = Random(3)
    samples = []
    for number in range(100):
        term = random.uniform(500, 3000)
        peak_mib = (600 + 2.5 * term) * math.exp(random.gauss(0, 0.02))
        samples.append(Sample(f"t{number}", "A100", (1200.0, term), peak_mib))
    calibration = taught(samples)
    for term in (600.0, 2900.0):
        assert 600 + 2.5 * term <= reserved(calibration, (1200.0, term)) <= (600 + 2.5 * term) * 1.2


def test_sizes_never_seen_raise_but_do_not_lower():
    calibration = taught(steady(100, 0.6))
    assert reserved(calibration) < declared_mib(TYPICAL)
    assert reserved(calibration, (1200.0, 20_000.0)) == declared_mib((1200.0, 20_000.0))
    calibration = taught(steady(100, 2.0))
    assert reserved(calibration, (1200.0, 20_000.0)) > 2.0 * 21_200


def test_the_neediest_of_the_allowed_models_counts():
    calibration = taught(steady(50, 1.0))
    for sample in steady(50, 1.6):
        calibration.learn(replace(sample, gpu_model="L4"))
    both, small, large = (reserved(calibration, models=models) for models in ((), ("A100",), ("L4",)))
    assert both == large > small * 1.4
    assert calibration.reserve_mib(TYPICAL, declared_mib(TYPICAL), ("H100",)) is None
    assert [(lesson.gpu_model, lesson.samples) for lesson in calibration.lessons()] == [("A100", 50), ("L4", 50)]


def test_many_samples_are_forgotten_by_generations():
    calibration = taught(steady(2100, 1.0, scatter=0.2))
    wide = reserved(calibration)
    for sample in steady(2100, 1.0, scatter=0.02, start=2100):
        calibration.learn(sample)
    assert reserved(calibration) < wide * 0.8


@settings(max_examples=30, deadline=None)
@given(SAMPLES, SAMPLES, SUMMANDS)
def test_the_state_survives_the_trip_through_json(samples, more, summands):
    calibration = taught(samples)
    again = Calibration.from_json(PROFILE, calibration.to_json())
    for sample in more:
        calibration.learn(sample)
        again.learn(sample)
    assert reserved(again, summands) == reserved(calibration, summands)
    assert again.to_json() == calibration.to_json()


def test_another_declaration_begins_anew():
    state = taught(steady(50)).to_json()
    changed = PROFILE.model_copy(update={"weights_mib": 700})
    assert Calibration.from_json(changed, state).learners == {}
    assert Calibration.from_json(PROFILE.model_copy(update={"margin": 2.0}), state).learners != {}
    with pytest.raises(ValueError, match="learners"):
        Calibration.from_json(PROFILE, b'{"declared": "x"}')


def test_samples_of_another_formula_are_passed_over():
    calibration = taught([Sample("t", "A100", (1200.0, 1.0, 2.0), 5000)] * 30)
    assert calibration.learners == {}


def test_lessons_tell_errors_and_out_of_memory():
    calibration = taught([*steady(100, 1.5), Sample("x", "A100", TYPICAL, 100.0, out_of_memory=True)])
    (lesson,) = calibration.lessons()
    assert (lesson.samples, lesson.out_of_memory, lesson.settled) == (100, 1, True)
    assert lesson.median_error == pytest.approx(1.5, rel=0.03)
    assert lesson.p99_error > lesson.median_error


def test_a_suggestion_reserves_about_what_was_learned():
    random = Random(5)
    samples = []
    for number in range(200):
        term = random.uniform(500, 3000)
        peak_mib = (1500 + 1.8 * term) * math.exp(random.gauss(0, 0.03))
        samples.append(Sample(f"t{number}", "A100", (1200.0, term), peak_mib))
    calibration = taught(samples)
    suggestion = calibration.suggestion()
    suggested = PROFILE.model_copy(update={"vram": suggestion.vram, "margin": suggestion.margin, "calibration": "off"})
    for w in (1200, 5000):
        learned = reserved(calibration, (1200.0, 0.5 * w))
        assert learned * 0.99 <= estimate(suggested, BrimHeader(), {"w": w}).demand.vram_mib <= learned * 1.15
    assert suggestion.vram.text.endswith("* w")
    assert Calibration(PROFILE).suggestion() is None


def test_the_mode_decides_what_is_reserved():
    learned = taught(steady(100, 1.8))
    modes = {
        mode: estimate(PROFILE.model_copy(update={"calibration": mode}), BrimHeader(), {"w": 2000}, learned)
        for mode in ("off", "suggest", "on")
    }
    assert modes["off"].demand == modes["suggest"].demand
    assert modes["off"].suggested_mib is None
    assert modes["suggest"].suggested_mib == modes["on"].suggested_mib > 1.8 * 2200
    assert modes["on"].demand.vram_mib >= modes["on"].suggested_mib > modes["off"].demand.vram_mib
    assert "learned from measured peaks; 2560 declared" in str(modes["on"])


def test_what_was_learned_refuses_nothing():
    bounded = PROFILE.model_copy(update={"max_mib": 3000})
    found = estimate(bounded, BrimHeader(), {"w": 2000}, taught(steady(100, 3.0), bounded))
    assert found.suggested_mib == 3000


def test_a_wrong_table_is_put_right_in_a_closed_loop():
    off, on = (simulate(kinds(7)[20:26], mode, 3000, 7) for mode in ("off", "on"))
    assert on.oom_rate <= 0.01
    assert on.oom_rate <= off.oom_rate / 3
    assert on.overreserve <= 0.25
