"""What a run came to, by hand-made records whose answers can be counted on fingers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from brim.core.model import Demand, Device, Identity, State
from brim.store.types import Record
from brim_services.summary import (
    Gpu,
    Overflow,
    Summary,
    exclusive_makespan_s,
    gpus,
    overflow,
    peak,
)

GPU = Device("GPU-0", "node", 0, "SIM", 1000, 100, 0, 0, 4, 0)


def record(task_id: str, *times: float, vram_mib: int = 300, device: str = "GPU-0") -> Record:
    admitted, placed, started, finished, ended = times
    return Record(
        task_id=task_id,
        task="t",
        state=State.SUCCEEDED,
        identity=Identity(task_id, 0, 0),
        run=1,
        lane="l",
        demand=Demand(vram_mib),
        context_mib=0,
        priority=3,
        attempts=1,
        losses=0,
        attempt=None,
        node="node",
        devices=(device,),
        reason=None,
        admitted_s=admitted,
        placed_s=placed,
        started_s=started,
        finished_s=finished,
        ended_s=ended,
    )


TWO = [record("a", 0.0, 0.01, 1.0, 3.0, 3.1), record("b", 0.0, 2.0, 2.5, 4.5, 4.6, vram_mib=500)]


def test_the_peak_is_the_largest_sum_of_what_overlaps() -> None:
    assert peak([(0, 2, 5), (1, 3, 7), (2, 4, 6)]) == 13
    assert peak([]) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 9)), max_size=12))
def test_the_peak_is_found_at_some_start(given_intervals: list[tuple[int, int, int]]) -> None:
    intervals = [(float(start), float(start + length), n) for start, length, n in given_intervals]

    by_hand = max((sum(n for s, e, n in intervals if s <= t < e) for t, _, _ in intervals), default=0)

    assert peak(intervals) == by_hand


def test_a_device_is_told_its_peaks() -> None:
    [gpu] = gpus([GPU], TWO, {"GPU-0": 640})

    assert gpu == Gpu("node.0", 800, 640, 1000, 2)


def test_only_tasks_placed_late_have_waited_and_an_eta_is_not_a_wait() -> None:
    delayed = replace(record("c", 0.0, 5.05, 6.0, 7.0, 7.0), eta_s=5.0)

    assert overflow([*TWO, delayed]) == Overflow(1, 2.0, 2.0)
    assert overflow([]) == Overflow()


def test_the_bound_for_one_task_per_gpu() -> None:
    assert exclusive_makespan_s(TWO, gpu_count=1) == 4.0
    assert exclusive_makespan_s(TWO, gpu_count=4) == 2.0
    assert exclusive_makespan_s([], gpu_count=4) == 0.0


def test_a_run_is_good_only_if_all_of_it_was() -> None:
    good = Summary({"succeeded": 2}, 0, Overflow(), [], 4.6, 4.0)

    assert good.good
    assert good.as_json()["invariants"] == "held"
    for bad in (
        replace(good, tasks={"succeeded": 1, "failed": 1}),
        replace(good, oom=1),
        replace(good, breaches=["x"]),
    ):
        assert not bad.good
    assert replace(good, breaches=["x"]).as_json()["invariants"] == ["x"]
