"""The executor's state machine, event by event (requirements B4–B9)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.batching import (
    Arrived,
    BatchKey,
    Claim,
    Claimed,
    Complete,
    Discard,
    Drain,
    Ending,
    ExecutorMachine,
    ExecutorState,
    Fail,
    Failed,
    Finished,
    InvalidEvent,
    Item,
    Limits,
    ModelKey,
    OutOfMemory,
    Raised,
    Report,
    Requeue,
    Stage,
    Staged,
    StageFailed,
    Start,
    Stop,
    Withdrawal,
    Withdrawn,
    WrongResultCount,
)

BERT = ModelKey("bert", "2")
KEY = BatchKey("embed", BERT, "64")
OTHER = BatchKey("embed", BERT, "128")
BOOM = ValueError("boom")
OOM = MemoryError("out of memory")


def items(*ids: str, size: float = 1.0) -> tuple[Item, ...]:
    return tuple(Item(id, size, since_s=float(ord(id[0]))) for id in ids)


def ids(instructions, kind):
    return [
        tuple(item.id for item in each.items) if hasattr(each, "items") else each.item.id
        for each in instructions
        if isinstance(each, kind)
    ]


def machine(*, stages: bool = False, **limits: float) -> ExecutorMachine:
    return ExecutorMachine(Limits(**{"max_items": 4} | limits), stages=stages)


def computing(*names: str, stages: bool = False, **limits: float) -> ExecutorMachine:
    """A machine that computes these items."""
    made = machine(stages=stages, **limits)
    made.handle(Arrived(KEY, items(*names)))
    if stages:
        made.handle(Staged(names))
    assert ids(made.handle(Claimed()), Start) == [names]
    return made


def compute(made: ExecutorMachine, instructions, function):
    """Run the machine until nothing is computed any more; returns all instructions."""
    seen = list(instructions)
    todo = list(instructions)
    while todo:
        match todo.pop(0):
            case Start(_, batch):
                todo += (more := made.handle(function([item.id for item in batch])))
                seen += more
            case Claim():
                todo += (more := made.handle(Claimed()))
                seen += more
    return seen


class TestFromIdleToWorking:
    def test_an_idle_executor_starts_a_single_item_at_once(self):
        # Given an idle executor without a stage hook
        made = machine()
        # When one item arrives
        answer = made.handle(Arrived(KEY, items("a")))
        # Then it is sealed and claimed in the same step, and computed once the claim is granted
        assert answer == [Claim(KEY, items("a")), Report(ExecutorState.WORKING, float("inf"))]
        assert made.handle(Claimed()) == [Start(KEY, items("a"))]

    def test_with_a_stage_hook_it_waits_for_staging_only(self):
        made = machine(stages=True)
        assert made.handle(Arrived(KEY, items("a", "b"))) == [
            Stage(KEY, items("a", "b")),
            Report(ExecutorState.WAITING, float("inf")),
        ]
        assert ids(made.handle(Staged(("a", "b"))), Claim) == [("a", "b")]

    def test_two_sets_are_staged_apart_so_that_the_first_starts_early(self):
        made = machine(stages=True)
        answer = made.handle(Arrived(KEY, items("a", "b", "c", "d", "e")))
        assert ids(answer, Stage) == [("a", "b", "c", "d"), ("e",)]

    def test_what_is_staged_starts_and_the_rest_goes_to_the_next_set(self):
        made = machine(stages=True)
        made.handle(Arrived(KEY, items("a", "b", "c")))
        assert ids(made.handle(Staged(("a", "c"))), Claim) == [("a", "c")]
        assert made.holds == {KEY: items("b")}

    def test_membership_is_open_until_sealing(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b")))
        made.handle(Arrived(KEY, items("c")))
        assert ids(made.handle(Finished(["A"])), Claim) == [("b", "c")]

    def test_keys_are_never_mixed_and_the_oldest_goes_first(self):
        made = machine(stages=True)
        made.handle(Arrived(OTHER, items("b")))
        made.handle(Arrived(KEY, items("a")))
        assert ids(made.handle(Staged(("a", "b"))), Claim) == [("a",)]
        made.handle(Claimed())
        assert made.handle(Finished(["A"]))[0] == Claim(OTHER, items("b"))


class TestSealingAhead:
    def test_a_full_spare_set_is_claimed_when_the_batch_is_about_to_end_and_starts_with_its_end(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b", "c", "d", "e")))
        assert made.handle(Ending()) == [Claim(KEY, items("b", "c", "d", "e"), ahead=True)]
        assert made.handle(Claimed()) == []
        assert not made.is_claiming
        # When the batch ends, then the next starts in the same step, before the outcomes
        answer = made.handle(Finished(["A"]))
        assert answer == [Start(KEY, items("b", "c", "d", "e")), Complete(items("a")[0], "A")]

    def test_one_that_can_still_grow_is_not(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b", "c", "d")))
        assert made.handle(Ending()) == []
        assert made.holds == {KEY: items("b", "c", "d")}

    def test_one_that_gets_full_only_then_is_claimed_then(self):
        made = computing("a", stages=True)
        made.handle(Arrived(KEY, items("b", "c", "d", "e")))
        made.handle(Ending())
        assert ids(made.handle(Staged(("b", "c", "d"))), Claim) == []
        assert ids(made.handle(Staged(("e",))), Claim) == [("b", "c", "d", "e")]

    def test_a_claim_that_is_not_answered_when_the_batch_ends_is_waited_for(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b", "c", "d", "e")))
        made.handle(Ending())
        assert ids(made.handle(Finished(["A"])), Start) == []
        assert made.is_claiming
        assert ids(made.handle(Claimed(frozenset("c"))), Start) == [("b", "d", "e")]

    def test_it_takes_nothing_until_that_one_begins(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b", "c", "d", "e")))
        made.handle(Ending())
        assert ids(made.handle(Arrived(KEY, items("f"))), Requeue) == ["f"]
        made.handle(Claimed())
        made.handle(Finished(["A"]))
        assert ids(made.handle(Arrived(KEY, items("g"))), Requeue) == []
        assert made.holds == {KEY: items("g")}

    def test_when_all_of_it_is_refused_the_next_set_is_sealed_as_ever(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b", "c", "d", "e")))
        made.handle(Ending())
        made.handle(Claimed(frozenset("bcde")))
        assert ids(made.handle(Arrived(KEY, items("f"))), Requeue) == []
        assert ids(made.handle(Finished(["A"])), Claim) == [("f",)]

    def test_not_while_parts_of_the_batch_are_left(self):
        made = computing("a", "b")
        made.handle(Arrived(KEY, items("c", "d", "e", "f")))
        made.handle(Raised(BOOM))
        assert made.handle(Ending()) == []

    def test_not_while_draining_and_what_is_sealed_ahead_is_finished(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b", "c", "d", "e")))
        made.handle(Ending())
        made.handle(Claimed())
        assert ids(made.handle(Drain()), Stop) == []
        assert ids(made.handle(Finished(["A"])), Start) == [("b", "c", "d", "e")]
        assert Stop() in made.handle(Finished(list("BCDE")))

    def test_what_the_batch_before_has_taught_bounds_it(self):
        made = computing("a", "b")
        made.handle(Arrived(KEY, items("c", "d", "e", "f")))
        made.handle(Ending())
        made.handle(Claimed())
        made.handle(OutOfMemory(OOM))
        made.handle(Finished(["A"]))
        assert ids(made.handle(Finished(["B"])), Start) == [("c",)]

    def test_a_word_that_comes_too_late_is_passed_over(self):
        assert machine().handle(Ending()) == []


class TestSpareSet:
    def test_fills_and_stages_beside_the_computation(self):
        made = computing("a", stages=True)
        answer = made.handle(Arrived(KEY, items("b")))
        assert answer == [Stage(KEY, items("b"))]
        assert made.state is ExecutorState.WORKING

    def test_takes_one_set_and_gives_back_what_is_more_with_the_short_resource(self):
        made = computing("a", max_items=2)
        answer = made.handle(Arrived(KEY, items("b", "c", "d")))
        assert ids(answer, Requeue) == ["d"]
        assert answer[0].reason.code == "max_items"

    def test_the_next_claim_comes_before_the_outcomes_of_the_last_batch(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b")))
        assert made.handle(Finished(["A"])) == [Claim(KEY, items("b")), Complete(items("a")[0], "A")]

    def test_an_executor_left_with_unstaged_items_waits_and_starts_with_the_first_staged(self):
        made = computing("a", stages=True)
        made.handle(Arrived(KEY, items("b", "c")))
        assert Report(ExecutorState.WAITING, float("inf")) in made.handle(Finished(["A"]))
        assert ids(made.handle(Staged(("b",))), Claim) == [("b",)]

    def test_leftovers_that_find_both_sets_taken_go_back_to_level_1(self):
        # Given one set of each key, the older one half staged
        made = machine(stages=True)
        made.handle(Arrived(KEY, items("a", "d")))
        made.handle(Arrived(OTHER, items("b")))
        # When it starts with what is staged
        answer = made.handle(Staged(("a",)))
        # Then the pair is the running batch and the older remaining set, and the newest goes back
        assert ids(answer, Claim) == [("a",)]
        assert ids(answer, Requeue) == ["d"]
        assert made.holds == {OTHER: items("b")}

    def test_padded_volume_bounds_a_batch(self):
        made = machine(max_volume=8.0)
        made.handle(Arrived(KEY, (Item("a", 1, 1), Item("b", 4, 2), Item("c", 1, 3))))
        assert made.holds == {KEY: (Item("c", 1, 3),)}

    def test_what_fits_no_batch_fails_with_the_limit_it_exceeds(self):
        answer = machine(per_unit_mib=10.0, reservation_mib=50.0).handle(Arrived(KEY, items("a", size=6)))
        assert ids(answer, Fail) == ["a"]
        assert answer[0].error.code == "batch_memory"


class TestClaims:
    def test_refused_items_leave_and_the_others_start(self):
        made = machine()
        made.handle(Arrived(KEY, items("a", "b")))
        answer = made.handle(Claimed(frozenset({"a"})))
        assert answer == [Start(KEY, items("b")), Discard(items("a")[0], Withdrawal.REFUSED)]

    def test_when_all_are_refused_the_next_set_is_sealed(self):
        made = machine()
        made.handle(Arrived(KEY, items("a")))
        made.handle(Arrived(KEY, items("b")))
        answer = made.handle(Claimed(frozenset({"a"})))
        assert answer[0] == Claim(KEY, items("b"))

    def test_when_nothing_else_is_there_the_executor_is_idle(self):
        made = machine()
        made.handle(Arrived(KEY, items("a")))
        assert Report(ExecutorState.IDLE, float("inf")) in made.handle(Claimed(frozenset({"a"})))


class TestWithdrawal:
    @pytest.mark.parametrize("why", [Withdrawal.EXPIRED, Withdrawal.REVOKED])
    def test_a_staged_item_leaves_alone(self, why):
        made = computing("a", stages=True)
        made.handle(Arrived(KEY, items("b", "c")))
        made.handle(Staged(("b", "c")))
        assert made.handle(Withdrawn("b", why)) == [Discard(items("b")[0], why)]
        assert ids(made.handle(Finished(["A"])), Claim) == [("c",)]

    def test_an_item_that_comes_back_is_staged_anew(self):
        made = machine(stages=True)
        made.handle(Arrived(KEY, items("a", "b")))
        made.handle(Staged(("a",)))
        made.handle(Arrived(KEY, items("c")))
        made.handle(Staged(("b", "c")))
        made.handle(Withdrawn("b", Withdrawal.REVOKED))
        made.handle(Arrived(KEY, items("b")))
        made.handle(Claimed())
        assert ids(made.handle(Finished(["A"])), Claim) == [("c",)]

    def test_a_sealed_item_is_computed_all_the_same(self):
        made = computing("a")
        assert made.handle(Withdrawn("a", Withdrawal.REVOKED)) == []
        assert ids(made.handle(Finished(["A"])), Complete) == ["a"]

    def test_staging_that_failed_fails_its_item_alone(self):
        made = machine(stages=True)
        made.handle(Arrived(KEY, items("a", "b")))
        assert made.handle(StageFailed("a", BOOM)) == [Fail(items("a")[0], BOOM)]
        assert ids(made.handle(Staged(("a", "b"))), Claim) == [("b",)]


class TestFailures:
    def test_an_item_that_failed_in_place_fails_alone_without_another_try(self):
        made = computing("a", "b", "c")
        answer = made.handle(Finished(["A", Failed(BOOM), "C"]))
        assert ids(answer, Start) == []
        assert ids(answer, Fail) == ["b"]
        assert ids(answer, Complete) == ["a", "c"]

    def test_a_batch_that_raised_is_bisected_before_anything_else_is_computed(self):
        made = computing("a", "b", "c", "d")
        made.handle(Arrived(KEY, items("e")))
        assert made.handle(Raised(BOOM)) == [Start(KEY, items("a", "b"))]
        # The first half is sound, so the fault is in the second: it is split without another try.
        answer = made.handle(Finished(["A", "B"]))
        assert answer[0] == Start(KEY, items("c"))
        assert ids(made.handle(Finished(["C"])), Start) == [("d",)]
        answer = made.handle(Raised(BOOM))
        assert answer[0] == Claim(KEY, items("e"))
        assert answer[1] == Fail(items("d")[0], BOOM)

    def test_a_wrong_number_of_results_says_so(self):
        made = computing("a")
        (fail, _) = made.handle(Finished(["A", "B"]))
        assert isinstance(fail.error, WrongResultCount)
        assert "embed returned 2 results for 1 items" in str(fail.error)

    @given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.booleans())
    @settings(max_examples=200)
    def test_exactly_the_guilty_fail_and_everything_keeps_its_order(self, count, guilty, drops):
        # Given a function that raises (or returns too little) as long as a guilty item is in its batch
        batch = tuple(Item(str(index), 1, float(index)) for index in range(count))
        made = ExecutorMachine(Limits(max_items=40), stages=False)
        calls = 0

        def function(of):
            nonlocal calls
            calls += 1
            bad = [name for name in of if int(name) in guilty]
            if bad and not drops:
                return Raised(BOOM)
            return Finished([name for name in of if name not in bad])

        # When the batch is computed
        answers = compute(made, made.handle(Arrived(KEY, batch)), function)
        # Then
        hit = sorted(index for index in guilty if index < count)
        assert [int(name) for name in ids(answers, Fail)] == hit
        assert [int(name) for name in ids(answers, Complete)] == [each for each in range(count) if each not in guilty]
        assert made.state is ExecutorState.IDLE
        # And a few guilty ones cost a few calls only
        assert calls <= 1 + 2 * len(hit) * max(1, (count - 1).bit_length())


class TestOutOfMemory:
    def test_the_batch_is_halved_and_the_next_is_smaller(self):
        made = computing("a", "b", "c", "d")
        made.handle(Arrived(KEY, items("e", "f")))
        answer = made.handle(OutOfMemory(OOM))
        assert answer == [Start(KEY, items("a", "b")), Report(ExecutorState.WORKING, 2.0)]
        assert ids(made.handle(Finished(["A", "B"])), Start) == [("c", "d")]
        assert made.handle(Finished(["C", "D"]))[0] == Claim(KEY, items("e", "f"))
        made.handle(Claimed())
        assert ids(made.handle(Arrived(KEY, items("g", "h", "i"))), Requeue) == ["i"]

    def test_a_spare_set_filled_beyond_the_new_ceiling_gives_back_its_tail(self):
        made = computing("a", "b", "c", "d")
        made.handle(Arrived(KEY, items("e", "f", "g", "h")))
        answer = made.handle(OutOfMemory(OOM))
        assert ids(answer, Requeue) == ["g", "h"]

    def test_an_item_that_runs_out_alone_fails_and_clears_the_size_of_its_batch(self):
        made = computing("a", "b", "c", "d")
        answers = compute(
            made,
            made.handle(OutOfMemory(OOM)),
            lambda of: OutOfMemory(OOM) if "c" in of else Finished(of),
        )
        assert ids(answers, Fail) == ["c"]
        assert ids(answers, Complete) == ["a", "b", "d"]
        assert answers[-1] == Report(ExecutorState.IDLE, float("inf"))

    @given(st.integers(1, 12), st.lists(st.integers(1, 8), min_size=1, max_size=80))
    def test_a_device_smaller_than_the_limits_computes_everything(self, real, sizes):
        made = ExecutorMachine(Limits(max_items=16), stages=False)
        todo = [Item(str(index), size, float(index)) for index, size in enumerate(sizes)]
        size_of = {item.id: item.size for item in todo}
        answers = []

        def function(of):
            fits = len(of) * max(size_of[name] for name in of) <= real
            return Finished(of) if fits else OutOfMemory(OOM)

        while todo:
            batch, todo = tuple(todo[:16]), todo[16:]
            answers += compute(made, made.handle(Arrived(KEY, batch)), function)
            todo = sorted(
                [*todo, *(each.item for each in answers if isinstance(each, Requeue))], key=lambda item: item.order
            )
            answers = [each for each in answers if not isinstance(each, Requeue)]
        assert sorted(ids(answers, Complete) + ids(answers, Fail)) == sorted(size_of)
        assert all(size_of[name] > real for name in ids(answers, Fail))
        assert all(size_of[name] <= real for name in ids(answers, Complete))


class TestDraining:
    def test_finishes_what_is_sealed_gives_back_the_rest_and_stops(self):
        made = computing("a")
        made.handle(Arrived(KEY, items("b")))
        answer = made.handle(Drain())
        assert ids(answer, Requeue) == ["b"]
        assert made.handle(Finished(["A"])) == [
            Complete(items("a")[0], "A"),
            Report(ExecutorState.IDLE, float("inf")),
            Stop(),
        ]

    def test_takes_nothing_more(self):
        made = computing("a")
        made.handle(Drain())
        answer = made.handle(Arrived(KEY, items("b")))
        assert ids(answer, Requeue) == ["b"]
        assert answer[0].reason.code == "draining"

    def test_an_idle_executor_stops_at_once_and_says_so_once(self):
        made = machine()
        assert made.handle(Drain()) == [Stop()]
        assert made.handle(Drain()) == []


@pytest.mark.parametrize("event", [Claimed(), Finished([]), Raised(BOOM), OutOfMemory(OOM)])
def test_an_answer_that_nobody_asked_for_is_refused_with_the_story(event):
    made = machine(stages=True)
    made.handle(Arrived(KEY, items("a")))
    with pytest.raises(InvalidEvent, match=r"(?s)state waiting.*Arrived.*'a'.*" + type(event).__name__):
        made.handle(event)


def test_an_item_cannot_arrive_twice():
    made = computing("a")
    with pytest.raises(InvalidEvent, match="a is held already"):
        made.handle(Arrived(KEY, items("a")))
