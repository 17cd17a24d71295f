"""What a node agent decides: given what it sees, then exactly this is to be done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.model import AttemptView, State
from brim.core.oversight import (
    SETTLE_S,
    STALLS,
    Action,
    Forget,
    Lose,
    Remembered,
    Replace,
    Restart,
    Sight,
    Worker,
    decide,
)

GPU = "GPU-a"
NOW_S = 1000.0
TIMEOUT_S = 10.0
HEALTHY = Worker("w1", ready=True, executors=frozenset({"10.1", "11.1"}))


def attempt(name: str = "a", state: State = State.RUNNING, **more: object) -> AttemptView:
    """A running attempt by default, bound to 10.1 of the healthy worker."""
    begun = state in (State.RUNNING, State.FINISHING)
    fields = {
        "proc": "10.1" if begun else "",
        "boot": "" if state is State.PLACED else "w1",
        "placed_s": NOW_S - 1,
    }
    return AttemptView(
        task_id=f"task-{name}",
        attempt=name,
        devices=(GPU,),
        vram_mib=1000,
        state=state,
        claimed_s=None,
        lane="l",
        context_mib=300,
        **(fields | more),  # type: ignore[arg-type]
    )


def sight(*attempts: AttemptView, worker: Worker = HEALTHY, **more: object) -> Sight:
    """What an agent of one device sees; bound executors are in the book, as the bind script leaves it."""
    book = {a.proc: False for a in attempts if a.proc}
    fields = {"now_s": NOW_S, "workers": {GPU: worker}, "attempts": attempts, "processes": {GPU: book}}
    return Sight(**(fields | more))  # type: ignore[arg-type]


def actions(seen: Sight, memory: Remembered | None = None) -> list[Action]:
    return decide(seen, memory or Remembered(), TIMEOUT_S)[0]


def codes(found: list[Action]) -> list[tuple[str, bool]]:
    return [(action.reason.code, action.counts) for action in found if isinstance(action, Lose)]


@pytest.mark.parametrize("state", [State.PLACED, State.CLAIMED, State.RUNNING, State.FINISHING])
def test_nothing_is_done_while_all_is_well(state: State) -> None:
    assert actions(sight(attempt(state=state))) == []


def test_a_dead_executors_attempt_is_lost_before_its_process_is_forgotten() -> None:
    a = attempt(proc="12.1")

    found = actions(sight(a, causes={"12.1": "was killed by SIGSEGV"}))

    assert codes(found) == [("executor_died", True)]
    assert str(found[0].reason) == "executor 12.1 was killed by SIGSEGV [executor_died]"  # type: ignore[union-attr]
    assert found[1:] == [Forget(GPU, "12.1")]


def test_how_an_executor_ended_may_be_unknown() -> None:
    (loss, _) = actions(sight(attempt(proc="12.1")))
    assert isinstance(loss, Lose)
    assert "is gone" in loss.reason.message


def test_a_dead_workers_attempts_are_lost_and_only_the_begun_ones_count() -> None:
    seen = sight(attempt("a"), attempt("b", State.CLAIMED), attempt("c", State.PLACED), worker=Worker())

    found = actions(replace(seen, causes={"w1": "exited with code 1"}))

    assert codes(found) == [("worker_died", True), ("worker_died", False), ("worker_down", False)]
    assert found[3:] == [Forget(GPU, "10.1")]


def test_attempts_of_an_earlier_boot_are_lost_though_the_new_worker_is_ready() -> None:
    found = actions(sight(attempt("a", State.CLAIMED, boot="w0"), attempt("b", State.PLACED)))
    assert codes(found) == [("worker_died", False)]


def test_a_restarted_worker_may_take_messages_before_it_says_that_it_is_ready() -> None:
    starting = replace(HEALTHY, ready=False)
    assert actions(sight(attempt(state=State.CLAIMED), worker=starting)) == []


def test_an_attempt_bound_to_an_executor_to_be_replaced_was_refused_and_does_not_count() -> None:
    found = actions(sight(attempt(), processes={GPU: {"10.1": True}}))
    assert codes(found) == [("executor_replaced", False)]


def test_an_idle_executor_is_replaced_once_it_has_settled() -> None:
    seen = sight(attempt(proc="11.1"), processes={GPU: {"10.1": True, "11.1": False}})

    found, memory = decide(seen, Remembered(), TIMEOUT_S)
    later = replace(seen, now_s=NOW_S + SETTLE_S)

    assert found == []
    assert actions(later, memory) == [Replace(GPU, "10.1")]


def test_an_attempt_is_not_waited_for_when_an_executor_has_long_been_idle() -> None:
    seen = sight(attempt("a", State.PLACED), attempt("b", State.CLAIMED))
    _, memory = decide(seen, Remembered(), TIMEOUT_S)

    found = actions(replace(seen, now_s=NOW_S + TIMEOUT_S), memory)

    assert codes(found) == [("not_started", False), ("not_started", False)]
    assert not any(action.begun for action in found if isinstance(action, Lose))


def test_an_attempt_behind_busy_executors_is_waited_for() -> None:
    seen = sight(attempt("a"), attempt("b", proc="11.1"), attempt("c", State.CLAIMED, placed_s=0.0))
    _, memory = decide(seen, Remembered(idle_since={GPU: 0.0}), TIMEOUT_S)
    assert memory.idle_since == {}
    assert actions(replace(seen, now_s=NOW_S + 100), memory) == []


def test_an_executor_to_be_replaced_does_not_count_as_idle() -> None:
    seen = sight(attempt("a", proc="11.1"), processes={GPU: {"10.1": True, "11.1": False}})
    assert decide(seen, Remembered(), TIMEOUT_S)[1].idle_since == {}


def test_a_draining_node_hands_back_what_has_not_begun() -> None:
    attempts = [attempt("a", State.PLACED), attempt("b", State.CLAIMED), attempt("c")]
    assert codes(actions(sight(*attempts, draining=True))) == [("node_draining", False)] * 2


def test_an_attempt_that_its_worker_answers_itself_is_not_handed_back() -> None:
    answering = attempt(state=State.FINISHING, proc="")
    assert actions(sight(answering, draining=True)) == []


def test_a_worker_that_takes_no_message_is_restarted() -> None:
    memory = Remembered(idle_since={GPU: 0.0})
    for number in range(STALLS):
        found, memory = decide(sight(attempt(str(number), State.PLACED, placed_s=0.0)), memory, TIMEOUT_S)

    assert isinstance(found[-1], Restart)
    assert found[-1].reason.code == "worker_stalled"


@pytest.mark.parametrize("sign", ["an end", "a claim"])
def test_a_worker_that_takes_messages_in_between_is_not_restarted(sign: str) -> None:
    memory = Remembered(idle_since={GPU: 0.0}, stalls={GPU: STALLS - 1})
    lost = attempt("a", State.PLACED, placed_s=0.0)
    if sign == "an end":
        found, _ = decide(sight(lost, consuming=frozenset({GPU})), memory, TIMEOUT_S)
    else:
        found, _ = decide(sight(lost, attempt("b", proc="10.1")), memory, TIMEOUT_S)
    assert codes(found) == [("not_started", False)]
    assert len(found) == 1


STATES = st.sampled_from([State.PLACED, State.CLAIMED, State.RUNNING, State.FINISHING])
ATTEMPTS = st.lists(
    st.builds(
        attempt,
        name=st.uuids().map(str),
        state=STATES,
        placed_s=st.floats(NOW_S - 50, NOW_S),
    ),
    max_size=5,
    unique_by=lambda a: a.attempt,
)
WORKERS = st.builds(
    Worker,
    boot=st.sampled_from(["", "w1", "w2"]),
    ready=st.booleans(),
    executors=st.frozensets(st.sampled_from(["10.1", "11.1"])),
)


@given(ATTEMPTS, WORKERS, st.booleans(), st.booleans(), st.sampled_from([{}, {GPU: NOW_S - 20}]))
def test_no_attempt_is_lost_twice_and_none_is_left_with_a_dead_process(
    attempts: list[AttemptView], worker: Worker, draining: bool, doomed: bool, idle_since: dict[str, float]
) -> None:
    seen = sight(*attempts, worker=worker, draining=draining, processes={GPU: {"10.1": doomed}})

    found = actions(seen, Remembered(idle_since=idle_since))

    lost = [action.attempt.attempt for action in found if isinstance(action, Lose)]
    assert len(lost) == len(set(lost))
    for a in attempts:
        if a.attempt not in lost:
            assert not a.proc or a.proc in worker.executors
            assert not a.boot or a.boot == worker.boot
    ended = [action.proc for action in found if isinstance(action, Replace)]
    assert not {a.proc for a in attempts if a.attempt not in lost} & set(ended)
