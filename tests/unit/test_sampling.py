"""Sampling is fast while memory moves and slow at rest; peaks say what was seen, and no more."""

from hypothesis import given
from hypothesis import strategies as st

from brim.core.model import AttemptView, Reason, State
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


def attempt(pid, name="1-1"):
    proc = f"{pid}.99" if pid else ""
    return AttemptView("t", name, (U,), 500, proc, State.RUNNING, "b00t", 0.0, 0.0, "lane", 300)


def raised(peaks, attempts, samples):
    return {view.attempt: mib for view, mib in peaks.observe(attempts, samples)}


def test_a_peak_is_the_most_that_was_seen_of_the_attempts_process_while_it_lived():
    peaks = Peaks()
    peaks.observe([], sample(900, {7: 900}))
    seen = [raised(peaks, [attempt(7)], sample(mib, {7: mib, 8: 1000})) for mib in (100, 400, 300)]
    assert seen == [{"1-1": 100}, {"1-1": 400}, {}]


def test_the_next_attempt_in_the_same_process_begins_from_nothing():
    peaks = Peaks()
    peaks.observe([attempt(7)], sample(400, {7: 400}))
    assert raised(peaks, [attempt(7, "1-2")], sample(50, {7: 50})) == {"1-2": 50}


def test_a_peak_nobody_saw_is_unknown_and_not_zero():
    peaks, attempts = Peaks(), [attempt(pid, f"1-{pid}") for pid in range(3)]
    assert raised(peaks, attempts, sample(10, {1: None})) == {}
    assert raised(peaks, attempts, sample(10, {}, complete=False)) == {}
    assert raised(peaks, attempts, {U: DeviceFault(U, Reason("device_lost", "lost"))}) == {}
    assert raised(peaks, attempts, sample(10, {2: 4})) == {"1-2": 4}
