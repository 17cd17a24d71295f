"""Sampling is fast while memory moves and slow at rest; peaks say what was seen, and no more."""

from hypothesis import given
from hypothesis import strategies as st

from brim.core.model import Reason
from brim.gpu.probe import DeviceFault, Sample
from brim.gpu.sampling import FAST_S, REST_S, Peaks, moved, next_interval_s

U = "GPU-1"


def sample(used=0, processes=None, complete=True):
    return {U: Sample(1000, used, 1000 - used, processes or {}, complete)}


def test_movement_of_memory_of_processes_and_of_health_is_noticed():
    assert not moved(sample(5, {1: 5}), sample(5, {1: 5}))
    assert moved(sample(5), sample(6))
    assert moved(sample(5, {1: 2, 2: 3}), sample(5, {1: 3, 2: 2}))
    assert moved(sample(5), {U: DeviceFault(U, Reason("device_lost", "lost"))})


@given(st.lists(st.booleans(), max_size=30))
def test_the_interval_stays_between_fast_and_rest_and_movement_makes_it_fast(history):
    interval_s = REST_S
    for moving in history:
        after_s = next_interval_s(interval_s, moving=moving)
        assert FAST_S <= after_s <= REST_S
        assert after_s == FAST_S if moving else after_s >= interval_s
        interval_s = after_s


def test_rest_is_reached_within_two_seconds():
    interval_s, passed_s = FAST_S, 0.0
    while interval_s < REST_S:
        passed_s += interval_s
        interval_s = next_interval_s(interval_s, moving=False)
    assert passed_s < 2


def test_a_peak_is_the_most_that_was_seen_while_it_was_watched():
    peaks = Peaks()
    peaks.observe(sample(900, {7: 900}))
    peaks.begin(U, 7)
    for mib in (100, 400, 300):
        peaks.observe(sample(mib, {7: mib, 8: 1000}))
    assert peaks.end(U, 7) == 400
    assert peaks.end(U, 7) is None


def test_a_peak_nobody_saw_is_unknown_and_not_zero():
    peaks = Peaks()
    for pid in (1, 2, 3):
        peaks.begin(U, pid)
    peaks.observe(sample(10, {1: None}))
    peaks.observe(sample(10, {}, complete=False))
    assert peaks.end(U, 1) is None
    peaks.observe(sample(10, {3: 4}))
    peaks.observe({U: DeviceFault(U, Reason("device_lost", "lost"))})
    assert peaks.end(U, 2) is None
    assert peaks.end(U, 3) == 4
