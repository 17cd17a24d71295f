"""Which item goes where (requirements B1, B2, B7, B8, B10)."""

from __future__ import annotations

import pytest

from brim.core.batching import (
    BatchKey,
    Choice,
    Commit,
    Executor,
    ExecutorState,
    Item,
    Lane,
    Limits,
    ModelKey,
    Phase,
    assign,
    choices,
)

BERT, CLIP = ModelKey("bert", "1"), ModelKey("clip")
KEY = BatchKey("embed", BERT)
OTHER = BatchKey("embed", BERT, "128")


def item(id: str, since_s: float, size: float = 1.0, priority: int = 0) -> Item:
    return Item(id, size, since_s, priority)


def row(first: int, last: int) -> tuple[Item, ...]:
    return tuple(item(f"{index:02}", index) for index in range(first, last + 1))


def executor(id: str = "a", *, unsealed: dict[BatchKey, tuple[Item, ...]] | None = None, **fields: object) -> Executor:
    values: dict[str, object] = {
        "model": BERT,
        "device": "gpu0",
        "vram_mib": 1000,
        "limits": Limits(max_items=4),
        "phase": Phase.UP,
        "since_s": 0.0,
        "used_s": 0.0,
        "keep_warm_s": 60.0,
        "unsealed": tuple((unsealed or {}).items()),
    }
    return Executor(id, **(values | fields))  # type: ignore[arg-type]


def given(plan, *, source: bool = False):
    """Which items each executor was given, in order."""
    shares: dict[str, list[str]] = {}
    for commit in plan.commits:
        if (commit.source is not None) == source:
            shares.setdefault(commit.executor, []).append(commit.item.id)
    return shares


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, ExecutorState.IDLE),
        ({"unsealed": {KEY: row(1, 1)}}, ExecutorState.WAITING),
        ({"working": True}, ExecutorState.WORKING),
        ({"working": True, "unsealed": {KEY: row(1, 1)}}, ExecutorState.WORKING),
    ],
)
def test_the_three_states(fields, state):
    assert executor(**fields).state is state


class TestNewItems:
    def test_go_to_an_idle_executor_rather_than_into_a_batch_being_filled(self):
        executors = [executor("a", working=True, unsealed={KEY: row(1, 1)}), executor("b")]
        assert given(assign([Lane(KEY, row(2, 2))], executors)) == {"b": ["02"]}

    def test_go_to_a_working_executor_before_level_1(self):
        assert given(assign([Lane(KEY, row(1, 1))], [executor("a", working=True)])) == {"a": ["01"]}

    def test_stay_in_level_1_when_every_executor_works_and_its_spare_set_is_full(self):
        executors = [executor("a", working=True, unsealed={KEY: row(1, 4)})]
        assert assign([Lane(KEY, row(5, 5))], executors).commits == ()

    def test_stay_in_level_1_when_the_spare_set_holds_another_key(self):
        executors = [executor("a", working=True, unsealed={OTHER: row(1, 1)})]
        assert assign([Lane(KEY, row(2, 2))], executors).commits == ()

    def test_stay_in_level_1_while_the_only_executor_has_claimed_a_batch_beside_the_one_it_computes(self):
        assert assign([Lane(KEY, row(1, 1))], [executor("a", working=True, ahead=True)]).commits == ()

    def test_top_up_a_set_of_their_key_rather_than_open_another(self):
        executors = [executor("a", working=True), executor("b", working=True, unsealed={KEY: row(1, 1)})]
        assert given(assign([Lane(KEY, row(2, 2))], executors)) == {"b": ["02"]}

    @pytest.mark.parametrize("fields", [{"phase": Phase.STARTING}, {"phase": Phase.DRAINING}, {"model": CLIP}])
    def test_never_go_to_an_executor_that_does_not_serve_them(self, fields):
        assert assign([Lane(KEY, row(1, 1))], [executor("a", **fields)]).commits == ()

    def test_keep_the_last_used_executor_warm_and_let_the_others_cool_down(self):
        executors = [executor("a", used_s=1.0), executor("b", used_s=2.0)]
        assert given(assign([Lane(KEY, row(1, 1))], executors)) == {"b": ["01"]}

    def test_that_are_too_large_for_an_executor_let_others_pass(self):
        lane = Lane(KEY, (item("big", 1, size=9), item("small", 2)))
        executors = [executor("a", limits=Limits(max_items=4, max_volume=8))]
        assert given(assign([lane], executors)) == {"a": ["small"]}


class TestLevel1:
    def test_fills_one_batch_after_another_idle_executors_first(self):
        plan = assign([Lane(KEY, row(1, 10))], [executor("a"), executor("b", working=True), executor("c")])
        assert given(plan) == {"a": ["01", "02", "03", "04"], "c": ["05", "06", "07", "08"], "b": ["09", "10"]}

    def test_is_served_by_the_order_of_lane_heads(self):
        lanes = [Lane(KEY, row(2, 6)), Lane(OTHER, (item("old", 1), item("new", 9)))]
        assert given(assign(lanes, [executor("a", working=True)])) == {"a": ["old", "new"]}

    def test_urgent_items_have_a_head_start_but_do_not_starve_others(self):
        lanes = [Lane(KEY, (item("urgent", 115, priority=0),)), Lane(OTHER, (item("patient", 100, priority=1),))]
        assert given(assign(lanes, [executor("a", working=True)])) == {"a": ["patient"]}

    def test_comes_before_what_a_sibling_holds(self):
        # Given an executor that has become free, a sibling's spare set, and level 1 with another shape
        executors = [executor("a", working=True, unsealed={KEY: row(1, 2)}), executor("b")]
        plan = assign([Lane(OTHER, row(5, 5))], executors)
        # Then the free one takes level 1
        assert given(plan) == {"b": ["05"]}
        assert given(plan, source=True) == {}

    def test_refuses_the_newest_beyond_its_limit_and_says_so(self):
        full = executor("a", working=True, unsealed={KEY: row(1, 4)})
        plan = assign([Lane(KEY, row(5, 8), limit=3)], [full])
        assert [refusal.item.id for refusal in plan.refusals] == ["08"]
        assert plan.refusals[0].reason.code == "level1_full"

    def test_counts_only_what_nobody_can_take(self):
        assert assign([Lane(KEY, row(1, 6), limit=2)], [executor("a", working=True)]).refusals == ()


class TestSiblings:
    def test_an_idle_executor_takes_what_a_working_one_has_not_sealed_oldest_first(self):
        executors = [
            executor("a", working=True, unsealed={KEY: row(3, 4)}),
            executor("b", working=True, unsealed={KEY: row(1, 2), OTHER: row(5, 6)}),
            executor("c", limits=Limits(max_items=3)),
        ]
        plan = assign([], executors)
        assert plan.commits == (
            Commit(item("01", 1), KEY, "c", "b"),
            Commit(item("02", 2), KEY, "c", "b"),
            Commit(item("03", 3), KEY, "c", "a"),
        )

    def test_two_idle_executors_never_take_the_same_item(self):
        executors = [executor("a", working=True, unsealed={KEY: row(1, 1)}), executor("b"), executor("c")]
        assert len(assign([], executors).commits) == 1

    def test_what_a_waiting_sibling_holds_is_about_to_start_and_stays(self):
        assert assign([], [executor("a", unsealed={KEY: row(1, 2)}), executor("b")]).commits == ()

    def test_what_does_not_fit_is_left_where_it_is(self):
        executors = [
            executor("a", working=True, unsealed={KEY: (item("big", 1, size=9), item("small", 2))}),
            executor("b", limits=Limits(max_items=4, max_volume=8)),
        ]
        assert given(assign([], executors), source=True) == {"b": ["small"]}

    def test_another_models_items_are_out_of_reach(self):
        executors = [executor("a", working=True, unsealed={KEY: row(1, 1)}), executor("b", model=CLIP)]
        assert assign([], executors).commits == ()


class TestChoices:
    def test_the_first_is_whom_assign_chooses_and_other_models_are_left_out(self):
        executors = [
            executor("full", working=True, unsealed={KEY: row(1, 4)}),
            executor("filling", working=True, unsealed={KEY: row(1, 2)}),
            executor("idle"),
            executor("clip", model=CLIP),
        ]
        new = item("new", 9)
        assert [choice.executor for choice in choices(KEY, new, executors)] == ["idle", "filling", "full"]
        assert given(assign([Lane(KEY, (new,))], executors)) == {"idle": ["new"]}

    @pytest.mark.parametrize(
        ("fields", "code", "told"),
        [
            ({"phase": Phase.STARTING}, "executor_starting", "is loading its model"),
            ({"phase": Phase.DRAINING}, "executor_draining", "is about to stop"),
            ({"limits": Limits(max_items=4, max_volume=1.5)}, "max_volume", "too large for any batch of it: padded"),
            (
                {"limits": Limits(max_items=4, per_unit_mib=10, reservation_mib=15)},
                "batch_memory",
                "too large for any batch of it: 20 MiB",
            ),
            ({"working": True, "ahead": True}, "task_sets", "has claimed the next one"),
            ({"working": True, "unsealed": {KEY: row(1, 4)}}, "max_items", "behind the one that it computes is full"),
            ({"unsealed": {KEY: row(1, 8)}}, "max_items", "its task sets are full: 5 items, and a batch holds 4"),
            ({"working": True, "unsealed": {OTHER: row(1, 1)}}, "task_sets", "holds another key"),
        ],
    )
    def test_an_obstacle_names_the_bound_and_assign_passes_it_over(self, fields, code, told):
        new, at = item("new", 9, size=2.0), executor(**fields)
        [choice] = choices(KEY, new, [at])
        assert choice.obstacle is not None
        assert (choice.obstacle.code, told in choice.obstacle.message) == (code, True), choice.obstacle
        assert assign([Lane(KEY, (new,))], [at]).commits == ()

    def test_an_executor_with_room_has_no_obstacle(self):
        assert choices(KEY, item("new", 9), [executor("a", unsealed={KEY: row(1, 3)})]) == [Choice("a")]
