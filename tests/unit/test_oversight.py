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
    STARTS,
    Action,
    Forget,
    Lose,
    Remembered,
    Replace,
    Restart,
    Retire,
    Sight,
    Start,
    decide,
)
from brim.core.posts import Post, Worker

GPU, QUEUE = "GPU-a", "gpu.n1.0"
POST = Post("gpu0", QUEUE, (GPU,), 2, standing=True)
NOW_S = 1000.0
TIMEOUT_S = 10.0
HEALTHY = Worker(POST, "w1", ready=True, executors=frozenset({"10.1", "11.1"}))


def attempt(name: str = "a", state: State = State.RUNNING, **more: object) -> AttemptView:
    """A running attempt by default, bound to 10.1 of the healthy worker."""
    begun = state in (State.RUNNING, State.FINISHING)
    fields: dict[str, object] = {
        "proc": "10.1" if begun else "",
        "boot": "" if state is State.PLACED else "w1",
        "placed_s": NOW_S - 1,
        "devices": (GPU,),
        "queue": QUEUE,
    }
    return AttemptView(
        task_id=f"task-{name}",
        attempt=name,
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
    fields = {"now_s": NOW_S, "workers": {"gpu0": worker}, "attempts": attempts, "processes": {GPU: book}}
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
    seen = sight(attempt("a"), attempt("b", State.CLAIMED), attempt("c", State.PLACED), worker=Worker(POST))

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


def test_an_attempt_whose_end_the_server_has_forgotten_is_settled_and_does_not_count() -> None:
    (loss,) = actions(sight(attempt(), over=frozenset({"a", "another"})))
    assert isinstance(loss, Lose)
    assert (loss.reason.code, loss.over, loss.counts) == ("end_lost", True, False)


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
    _, memory = decide(seen, Remembered(idle_since={QUEUE: 0.0}), TIMEOUT_S)
    assert memory.idle_since == {}
    assert actions(replace(seen, now_s=NOW_S + 100), memory) == []


def passed_over(**more: object) -> tuple[list[Action], list[Action]]:
    """What is done about `lost` on a device that is never idle, when a later one is taken and long after that."""
    lost = attempt("lost", State.PLACED, placed_s=NOW_S - 5, **more)
    seen = sight(attempt("a", placed_s=NOW_S - 9), attempt("b", proc="11.1", placed_s=NOW_S - 1), lost)
    early, memory = decide(seen, Remembered(), TIMEOUT_S)
    _, memory = decide(replace(seen, now_s=NOW_S + 1, attempts=[attempt("c", placed_s=NOW_S - 9), lost]), memory, 1e9)
    return early, actions(replace(seen, now_s=NOW_S + TIMEOUT_S), memory)


def test_an_attempt_whose_message_vanished_is_given_up_once_a_later_one_has_long_been_taken() -> None:
    early, late = passed_over()

    assert early == []
    assert codes(late) == [("not_started", False)]
    assert late[0].reason.message.endswith("which took one placed after it 10 s ago")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "more",
    [
        {"state": State.CLAIMED, "boot": "w1"},  # it has its message: a pool process that starts may hold it
        {"placed_s": NOW_S - 1},  # committed together: nobody knows which came first
        {"queue": "gpu.n1.9"},
    ],
)
def test_an_attempt_that_was_not_passed_over_is_waited_for(more: dict[str, object]) -> None:
    kept = replace(attempt("kept", State.PLACED, placed_s=NOW_S - 5), **more)  # type: ignore[arg-type]
    others = [attempt("a", placed_s=NOW_S - 9), attempt("b", proc="11.1", placed_s=NOW_S - 1)]
    workers = {"gpu0": HEALTHY, "gpu9": replace(HEALTHY, post=replace(POST, queue="gpu.n1.9"), executors=frozenset())}
    seen = sight(*others, kept, workers=workers)
    _, memory = decide(seen, Remembered(), TIMEOUT_S)
    assert memory.passed_since == {}
    assert actions(replace(seen, now_s=NOW_S + 100), memory) == []


def test_an_attempt_is_not_passed_over_by_what_a_former_worker_took() -> None:
    seen = sight(attempt("a", State.CLAIMED, boot="w0"), attempt("b", State.PLACED, placed_s=NOW_S - 5))
    assert decide(seen, Remembered(), TIMEOUT_S)[1].passed_since == {}


def test_an_attempt_that_is_taken_after_all_is_passed_over_no_more() -> None:
    late = attempt("late", State.PLACED, placed_s=NOW_S - 5)
    _, memory = decide(sight(attempt("a"), late), Remembered(), TIMEOUT_S)
    assert memory.passed_since == {"late": NOW_S}
    taken = replace(late, state=State.CLAIMED, boot="w1")
    assert decide(sight(attempt("a"), taken), memory, TIMEOUT_S)[1].passed_since == {}


def test_workers_of_several_devices_pass_nobody_over() -> None:
    seen = sight(
        on_both("a", State.RUNNING), on_both("b", placed_s=NOW_S - 5), workers={"gpu0-1": SEES_BOTH, "gpu0": HEALTHY}
    )
    assert decide(seen, Remembered(), TIMEOUT_S)[1].passed_since == {}


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
    memory = Remembered(idle_since={QUEUE: 0.0})
    for number in range(STALLS):
        found, memory = decide(sight(attempt(str(number), State.PLACED, placed_s=0.0)), memory, TIMEOUT_S)

    assert isinstance(found[-1], Restart)
    assert found[-1].reason.code == "worker_stalled"


@pytest.mark.parametrize("sign", ["an end", "a claim"])
def test_a_worker_that_takes_messages_in_between_is_not_restarted(sign: str) -> None:
    memory = Remembered(idle_since={QUEUE: 0.0}, stalls={QUEUE: STALLS - 1})
    lost = attempt("a", State.PLACED, placed_s=0.0)
    if sign == "an end":
        found, _ = decide(sight(lost, consuming=frozenset({QUEUE})), memory, TIMEOUT_S)
    else:
        found, _ = decide(sight(lost, attempt("b", proc="10.1")), memory, TIMEOUT_S)
    assert codes(found) == [("not_started", False)]
    assert len(found) == 1


# -- workers on demand ---------------------------------------------------------------------------------------------

PAIR, PAIRED = ("GPU-a", "GPU-b"), "gpu.n1.0-1"
SET = Post("gpu0-1", PAIRED, PAIR, linger_s=60.0)
SEES_BOTH = Worker(SET, "s1", ready=True, executors=frozenset({"20.1"}))
OTHER = Worker(Post("gpu1", "gpu.n1.1", ("GPU-b",), 2, standing=True), "w2", ready=True, executors=frozenset({"12.1"}))
IDLE_S = 60.0


def on_both(name: str = "p", state: State = State.PLACED, **more: object) -> AttemptView:
    """An attempt on two devices, placed by default, else claimed or run by the worker that sees both."""
    begun = state in (State.RUNNING, State.FINISHING)
    seen = {"boot": "" if state is State.PLACED else "s1", "proc": "20.1" if begun else ""}
    return attempt(name, state, devices=PAIR, queue=PAIRED, **(seen | more))


def at_both(*attempts: AttemptView, workers: tuple[Worker, ...] = (), **more: object) -> Sight:
    """What an agent of two devices sees, both of which have their own worker."""
    books = {gpu: {a.proc: False for a in attempts if a.proc and gpu in a.devices} for gpu in PAIR}
    there = {worker.post.name: worker for worker in (HEALTHY, OTHER, *workers)}
    return sight(*attempts, **({"workers": there, "processes": books} | more))


def done(seen: Sight, memory: Remembered | None = None) -> list[Action]:
    return decide(seen, memory or Remembered(), TIMEOUT_S, IDLE_S)[0]


def test_an_attempt_on_several_devices_calls_for_a_worker_that_sees_exactly_those() -> None:
    assert done(at_both(on_both())) == [Start(SET)]


def test_the_worker_of_a_set_is_waited_for_while_it_starts_however_long_that_takes() -> None:
    starting = replace(SEES_BOTH, ready=False, executors=frozenset())
    memory = Remembered()
    for now_s in (NOW_S, NOW_S + 10 * TIMEOUT_S):
        found, memory = decide(at_both(on_both(), workers=(starting,), now_s=now_s), memory, TIMEOUT_S, IDLE_S)
        assert found == []


def test_a_message_to_a_set_that_was_lost_is_not_waited_for_once_its_worker_is_ready() -> None:
    seen = at_both(on_both(), workers=(SEES_BOTH,))
    found, memory = decide(seen, Remembered(), TIMEOUT_S, IDLE_S)
    assert found == []
    assert codes(done(replace(seen, now_s=NOW_S + TIMEOUT_S), memory)) == [("not_started", False)]


def test_each_attempt_on_a_set_gets_a_worker_of_its_own() -> None:
    running, placed = on_both("a", State.RUNNING), on_both("b")
    assert done(at_both(running, placed, workers=(SEES_BOTH,))) == [Start(replace(SET, name="gpu0-1.2"))]


def test_attempts_that_were_placed_together_call_for_their_workers_together() -> None:
    found = done(at_both(on_both("a"), on_both("b")))
    assert found == [Start(SET), Start(replace(SET, name="gpu0-1.2"))]


def test_a_free_worker_takes_the_next_attempt_on_its_set() -> None:
    assert done(at_both(on_both(), workers=(SEES_BOTH,))) == []


def test_a_worker_that_ends_soon_after_its_start_again_and_again_gives_its_attempt_back() -> None:
    failing = Worker(SET, failures=STARTS, trouble="exited with code 1")

    (loss,) = done(at_both(on_both(), workers=(failing,)))

    assert isinstance(loss, Lose)
    assert (loss.reason.code, loss.counts) == ("worker_cannot_start", True)
    assert "gpu0-1 ended 3 times soon after its start: it exited with code 1" in loss.reason.message


def test_a_worker_that_failed_once_is_started_again() -> None:
    assert done(at_both(on_both(), workers=(Worker(SET, failures=STARTS - 1),))) == []


def test_a_worker_that_nothing_calls_for_is_retired_when_it_has_been_idle_for_long() -> None:
    seen = at_both(workers=(SEES_BOTH,))
    found, memory = decide(seen, Remembered(), TIMEOUT_S, IDLE_S)
    assert found == []
    assert done(replace(seen, now_s=NOW_S + IDLE_S - 1), memory) == []
    assert done(replace(seen, now_s=NOW_S + IDLE_S), memory) == [Retire("gpu0-1")]


def test_an_attempt_begins_the_idle_time_anew() -> None:
    memory = Remembered(uncalled_since={"gpu0-1": 0.0})
    _, memory = decide(at_both(on_both(), workers=(SEES_BOTH,)), memory, TIMEOUT_S, IDLE_S)
    assert memory.uncalled_since == {}


@pytest.mark.parametrize("state", [State.CLAIMED, State.RUNNING, State.FINISHING])
def test_a_worker_on_demand_is_never_ended_in_the_middle_of_a_task(state: State) -> None:
    memory = Remembered(uncalled_since={"gpu0-1": 0.0})
    ending = replace(SEES_BOTH, ending=True)
    for worker in (SEES_BOTH, ending):
        assert done(at_both(on_both("a", state), workers=(worker,)), memory) == []


def test_a_worker_that_was_asked_to_end_is_asked_until_it_has_and_takes_no_part() -> None:
    found = done(at_both(on_both(), workers=(replace(SEES_BOTH, ending=True),)))
    assert found == [Retire("gpu0-1"), Start(replace(SET, name="gpu0-1.2"))]


def test_a_set_whose_leftover_is_wanted_back_is_retired_as_a_whole() -> None:
    seen = at_both(workers=(SEES_BOTH,), processes={"GPU-a": {"20.1": True}, "GPU-b": {"20.1": False}})
    found, memory = decide(seen, Remembered(), TIMEOUT_S, IDLE_S)
    assert found == []
    assert done(replace(seen, now_s=NOW_S + SETTLE_S), memory) == [Retire("gpu0-1")]


def test_a_dead_executor_of_a_set_is_forgotten_on_each_of_its_devices() -> None:
    running = on_both("a", State.RUNNING, proc="21.1")
    found = done(at_both(running, workers=(SEES_BOTH,)))
    assert codes(found) == [("executor_died", True)]
    assert found[1:] == [Forget("GPU-a", "21.1"), Forget("GPU-b", "21.1")]


def test_executors_of_a_set_and_those_of_a_device_live_side_by_side_in_its_book() -> None:
    seen = at_both(attempt(), on_both("a", State.RUNNING), workers=(SEES_BOTH,))
    assert seen.processes["GPU-a"] == {"10.1": False, "20.1": False}
    assert done(seen) == []


def test_a_dead_worker_that_nothing_calls_for_is_not_started_again() -> None:
    assert done(at_both(workers=(Worker(SET, failures=1),))) == [Retire("gpu0-1")]


def test_of_several_workers_of_a_set_only_an_idle_one_is_restarted_for_not_listening() -> None:
    deaf = replace(SEES_BOTH, post=replace(SET, name="gpu0-1.2"), boot="s2", executors=frozenset({"21.1"}))
    memory = Remembered(idle_since={PAIRED: 0.0}, stalls={PAIRED: STALLS - 1})
    lost, running = on_both("b", placed_s=0.0), on_both("a", State.RUNNING)
    assert codes(done(at_both(lost, workers=(deaf,)), memory)) == [("not_started", False)]
    assert [a.worker for a in done(at_both(lost, workers=(deaf,)), memory) if isinstance(a, Restart)] == ["gpu0-1.2"]
    found = done(at_both(lost, running, workers=(SEES_BOTH, deaf)), memory)
    assert not any(isinstance(action, Restart) for action in found)  # one of them has taken a message


def test_a_draining_node_starts_no_worker() -> None:
    assert codes(done(at_both(on_both(), draining=True))) == [("node_draining", False)]


def test_a_post_that_is_wanted_for_itself_is_filled_and_left_when_it_is_not_wanted_any_more() -> None:
    model = Post("gpu0.llm", "gpu.n1.0.llm", (GPU,), pool="threads")
    assert done(at_both(wanted=(model,))) == [Start(model)]

    there = Worker(model, "m1", ready=True, executors=frozenset({"30.1"}))
    assert done(at_both(workers=(there,), wanted=(model,))) == []
    assert done(at_both(workers=(there,))) == [Retire("gpu0.llm")]


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
    post=st.just(POST),
    boot=st.sampled_from(["", "w1", "w2"]),
    ready=st.booleans(),
    executors=st.frozensets(st.sampled_from(["10.1", "11.1"])),
)


@given(ATTEMPTS, WORKERS, st.booleans(), st.booleans(), st.sampled_from([{}, {QUEUE: NOW_S - 20}]))
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


SET_WORKERS = st.lists(
    st.builds(
        Worker,
        post=st.just(SET),
        boot=st.sampled_from(["", "s1", "s2"]),
        ready=st.booleans(),
        executors=st.frozensets(st.sampled_from(["20.1", "21.1"]), max_size=1),
        failures=st.integers(0, STARTS),
        ending=st.booleans(),
    ),
    max_size=3,
)
SET_ATTEMPTS = st.lists(
    st.builds(on_both, name=st.uuids().map(str), state=STATES, placed_s=st.floats(NOW_S - 50, NOW_S)), max_size=4
)


@given(SET_ATTEMPTS, SET_WORKERS, st.sampled_from([{}, {"gpu0-1": 0.0, "gpu0-1.2": 0.0}]), st.booleans())
def test_every_attempt_on_a_set_is_lost_or_served_and_no_worker_is_ended_under_one(
    attempts: list[AttemptView], workers: list[Worker], uncalled_since: dict[str, float], doomed: bool
) -> None:
    names = [SET.name, *(f"{SET.name}.{number}" for number in range(2, len(workers) + 1))]
    named = [replace(w, post=replace(SET, name=name)) for w, name in zip(workers, names, strict=False)]
    seen = at_both(*attempts, workers=tuple(named), processes={"GPU-a": {"20.1": doomed}, "GPU-b": {}})

    found = done(seen, Remembered(uncalled_since=uncalled_since, doomed_since={"20.1": 0.0}))

    lost = {action.attempt.attempt for action in found if isinstance(action, Lose)}
    kept = [a for a in attempts if a.attempt not in lost]
    retired = {action.worker for action in found if isinstance(action, Retire)}
    started = [action.post.name for action in found if isinstance(action, Start)]
    assert len(started) == len(set(started))
    assert not seen.workers.keys() & set(started)
    boots = {a.boot for a in kept if a.boot}
    assert not any(worker.post.name in retired and worker.boot in boots for worker in named)
    free = [worker for worker in named if not worker.ending and worker.boot not in boots]
    assert len(started) + len(free) >= sum(not a.boot for a in kept)
