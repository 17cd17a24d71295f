"""Volume, limits, what is learned from running out of memory, and the derived task sets (B4, B5, B11)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.batching import EMPTY, BatchKey, Ceiling, Item, Limits, ModelKey, TaskSets, cut, load_of

KEY = BatchKey("embed", ModelKey("bert"))
OTHER = BatchKey("embed", ModelKey("bert"), "128")
sizes = st.lists(st.floats(0.5, 20), max_size=40)
limits = st.builds(
    Limits,
    max_items=st.integers(1, 8),
    max_volume=st.floats(20, 100),
    per_unit_mib=st.floats(0, 3),
    reservation_mib=st.floats(61, 200),
    ceiling=st.floats(1, 100),
)


class TestLimits:
    @pytest.mark.parametrize(
        ("bound", "of", "code"),
        [
            ({"max_items": 2}, [1, 1, 1], "max_items"),
            ({"max_volume": 11}, [1, 1, 4], "max_volume"),
            ({"per_unit_mib": 2, "reservation_mib": 23}, [1, 1, 4], "batch_memory"),
            ({"ceiling": 11}, [1, 1, 4], "ran_out_of_memory"),
        ],
    )
    def test_name_what_a_batch_exceeds_by_its_padded_volume(self, bound, of, code):
        reason = Limits(**{"max_items": 8} | bound).shortage(load_of(of))
        assert reason is not None
        assert reason.code == code

    def test_allow_what_just_fits(self):
        bound = Limits(max_items=3, max_volume=12, per_unit_mib=2, reservation_mib=24, ceiling=12)
        assert bound.shortage(load_of([1, 1, 4])) is None
        assert bound.fullness(load_of([1, 1, 4])) == 1
        assert bound.fullness(EMPTY) == 0

    def test_let_an_item_alone_exceed_what_was_learned(self):
        assert Limits(max_items=3, ceiling=2).shortage(load_of([9])) is None

    def test_fullness_is_volume_not_count(self):
        bound = Limits(max_items=100, max_volume=100)
        assert bound.fullness(load_of([1, 1, 25])) == 0.75

    @pytest.mark.parametrize("field", ["max_items", "max_volume", "reservation_mib", "per_unit_mib"])
    def test_refuse_nonsense_by_its_field(self, field):
        with pytest.raises(ValueError, match=field):
            Limits(**{"max_items": 1} | {field: -1})

    @given(sizes, limits)
    def test_cut_keeps_every_item_within_the_limits_and_never_cuts_early(self, of, bound):
        loads = cut(of, bound)
        assert sum(load.items for load in loads) == len(of)
        assert all(bound.shortage(load) is None for load in loads)
        end = 0
        for load in loads[:-1]:
            end += load.items
            assert bound.shortage(load + of[end]) is not None


class TestCeiling:
    def test_the_next_batch_is_half_of_what_failed(self):
        assert Ceiling().after_out_of_memory(load_of([1] * 32)).volume == 16

    def test_but_not_less_than_what_has_succeeded(self):
        ceiling = Ceiling().after_success(load_of([1] * 24)).after_out_of_memory(load_of([1] * 32))
        assert ceiling.volume == 24

    def test_a_success_that_no_longer_holds_counts_no_more(self):
        ceiling = Ceiling().after_success(load_of([1] * 32)).after_out_of_memory(load_of([1] * 32))
        assert ceiling.volume == 16

    @given(st.integers(1, 31))
    @settings(max_examples=31, deadline=None)
    def test_settles_just_below_the_real_limit_and_meets_it_ever_more_rarely(self, real):
        # Given a device that bears `real` units, when 1,000 full batches have been computed
        ceiling, failures, last = Ceiling(), [], 0
        for batch in range(1000):
            load = load_of([1] * max(1, min(32, int(ceiling.volume) if ceiling.volume < 32 else 32)))
            if load.items > real:
                ceiling = ceiling.after_out_of_memory(load)
                failures.append(batch)
            else:
                ceiling = ceiling.after_success(load)
                last = load.items
        # Then batches are nearly as large as they can be, and failures have become rare
        assert last >= 0.7 * real
        assert len(failures) <= 20
        assert sum(batch >= 500 for batch in failures) <= 3

    def test_a_passing_shortage_is_forgotten(self):
        ceiling = Ceiling().after_out_of_memory(load_of([1] * 8))
        for _ in range(200):
            ceiling = ceiling.after_success(load_of([1] * int(min(ceiling.volume, 32))))
        assert ceiling.volume >= 32


class TestTaskSets:
    def test_one_key_may_take_both_sets(self):
        sets = TaskSets(Limits(max_items=2))
        for index in range(4):
            item = Item(str(index), 1, index)
            assert sets.shortage(KEY, item, room=2) is None
            sets.add(KEY, item)
        reason = sets.shortage(KEY, Item("x", 1, 9), room=2)
        assert reason is not None
        assert reason.code == "max_items"

    def test_another_key_needs_a_set_of_its_own(self):
        sets = TaskSets(Limits(max_items=8), {KEY: [Item("a", 1, 1)]})
        assert sets.shortage(OTHER, Item("b", 1, 2), room=2) is None
        reason = sets.shortage(OTHER, Item("b", 1, 2), room=1)
        assert reason is not None
        assert reason.code == "task_sets"

    def test_what_fits_no_batch_says_why(self):
        reason = TaskSets(Limits(max_items=8, max_volume=5)).shortage(KEY, Item("a", 6, 1), room=2)
        assert reason is not None
        assert reason.code == "max_volume"

    def test_an_urgent_item_takes_its_place_in_order(self):
        sets = TaskSets(Limits(max_items=8), {KEY: [Item("a", 1, 100.0, priority=3)]})
        sets.add(KEY, Item("b", 1, 101.0, priority=0))
        assert [item.id for _, items in sets for item in items] == ["b", "a"]

    def test_priority_is_a_head_start_that_waiting_makes_up_for(self):
        assert Item("late", 1, 120.0, priority=0).order > Item("early", 1, 100.0, priority=1).order

    @given(st.lists(st.tuples(st.booleans(), st.floats(0.5, 20), st.integers(0, 9)), max_size=30), limits, st.data())
    def test_sets_stay_what_a_fresh_cut_gives_whatever_comes_and_goes(self, made, bound, data):
        sets, held = TaskSets(bound), {}
        for index, (other, size, priority) in enumerate(made):
            key, item = (OTHER if other else KEY), Item(str(index), size, float(index), priority)
            short = sets.shortage(key, item, room=2)
            if short is None:
                sets.add(key, item)
                held[item.id] = (key, item)
            if held and data.draw(st.booleans(), label="remove"):
                gone = data.draw(st.sampled_from(sorted(held)), label="which")
                sets.remove(held.pop(gone)[0], [gone])
            fresh = {
                of: sorted((item for at, item in held.values() if at == of), key=lambda item: item.order)
                for of in (KEY, OTHER)
            }
            assert {of: items for of, items in sets} == {of: items for of, items in fresh.items() if items}
            assert sets.count() == sum(len(cut([item.size for item in items], bound)) for items in fresh.values())

    @given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2))
    def test_beyond_names_the_newest_sets(self, made, room):
        sets = TaskSets(Limits(max_items=2))
        for index, other in enumerate(made):
            sets.add(OTHER if other else KEY, Item(str(index), 1, float(index)))
        gone = sets.beyond(room)
        for key, item in gone:
            sets.remove(key, [item.id])
        assert sets.count() <= room
        for key, items in sets:
            assert all(item.order > items[-1].order for of, item in gone if of == key)
