"""Which executors there are: starting, cooling down, making room, sharing a GPU fairly."""

from __future__ import annotations

from dataclasses import replace

from brim.core.batching import (
    BatchKey,
    Executor,
    Item,
    Launch,
    Limits,
    ModelKey,
    Phase,
    Retire,
    Rules,
    Want,
    settle,
)
from brim.core.model import Device

BERT, CLIP, SAM = ModelKey("bert", "1"), ModelKey("clip"), ModelKey("sam")
RULES = Rules(hold_s=10.0, scale_out_s=1.0)


def want(model: ModelKey | None = BERT, since_s: float = 99.5, least_mib: int = 4000, **fields: object) -> Want:
    values: dict[str, object] = {
        "model": model,
        "order": since_s,
        "since_s": since_s,
        "alone_mib": 3000,
        "least_mib": least_mib,
        "full_mib": 6000,
        "devices": frozenset({"gpu0", "gpu1"}),
    }
    return Want(**(values | fields))  # type: ignore[arg-type]


def device(uuid: str = "gpu0", free_mib: int = 8000, state: str = "up") -> Device:
    return Device(uuid, "n", 0, "A100", 24000, 0, 0, 24000 - free_mib, 4, 0, state=state)


def executor(id: str = "a", model: ModelKey = BERT, *, held: tuple[float, ...] = (), **fields: object) -> Executor:
    key = BatchKey("task", model)
    values: dict[str, object] = {
        "device": "gpu0",
        "vram_mib": 6000,
        "limits": Limits(max_items=4),
        "phase": Phase.UP,
        "since_s": 0.0,
        "used_s": 95.0,
        "keep_warm_s": 60.0,
        "unsealed": ((key, tuple(Item(str(since_s), 1, since_s) for since_s in held)),) if held else (),
    }
    return Executor(id, model, **(values | fields))  # type: ignore[arg-type]


def decide(wants=(), executors=(), devices=None, now=100.0):
    return settle(wants, executors, [device()] if devices is None else devices, now, RULES)


def retired(moves):
    return {move.executor: move.reason.code for move in moves if isinstance(move, Retire)}


class TestStarting:
    def test_a_wanted_model_starts_where_a_full_batch_fits_tightest(self):
        devices = [device("gpu0", 9000), device("gpu1", 7000)]
        assert decide([want()], devices=devices) == [Launch(BERT, "gpu1", 6000)]

    def test_or_with_less_where_a_useful_batch_fits(self):
        assert decide([want()], devices=[device(free_mib=5000)]) == [Launch(BERT, "gpu0", 5000)]

    def test_not_on_a_device_that_is_not_up_or_not_allowed(self):
        assert decide([want()], devices=[device("gpu0", state="lost"), device("gpu2")]) == []

    def test_one_is_started_at_a_time(self):
        assert decide([want(max_executors=3, since_s=50)], [executor(phase=Phase.STARTING)], [device("gpu1")]) == []

    def test_one_more_when_level_1_has_stayed_non_empty_and_memory_is_free(self):
        working = [executor(working=True)]
        assert decide([want(since_s=98.9, max_executors=2)], working) == [Launch(BERT, "gpu0", 6000)]
        assert decide([want(since_s=99.1, max_executors=2)], working) == []
        assert decide([want(since_s=90, max_executors=1)], working) == []

    def test_one_more_makes_nobody_stop(self):
        others = [executor("a", working=True), executor("b", CLIP)]
        assert decide([want(since_s=90, max_executors=2)], others, [device(free_mib=0)]) == []

    def test_a_first_executor_goes_before_one_more_of_a_busy_model(self):
        wants = [want(BERT, since_s=50, max_executors=2), want(CLIP, since_s=99)]
        assert decide(wants, [executor(working=True)], [device(free_mib=6000)]) == [Launch(CLIP, "gpu0", 6000)]

    def test_among_first_executors_the_oldest_item_decides(self):
        wants = [want(BERT, since_s=99), want(CLIP, since_s=98)]
        assert decide(wants, devices=[device(free_mib=6000)]) == [Launch(CLIP, "gpu0", 6000)]


class TestStopping:
    def test_after_its_warm_time_unused(self):
        assert retired(decide(executors=[executor(used_s=39)])) == {"a": "idle"}
        assert retired(decide(executors=[executor(used_s=41)])) == {}

    def test_the_warm_time_starts_when_it_comes_up(self):
        assert retired(decide(executors=[executor(used_s=0, since_s=90)])) == {}

    def test_not_while_it_holds_or_awaits_anything(self):
        assert retired(decide(executors=[executor(used_s=0, working=True)])) == {}
        assert retired(decide(executors=[executor(used_s=0, held=(1.0,))])) == {}
        assert retired(decide([want()], [executor(used_s=0)])) == {}


class TestMakingRoom:
    def test_the_least_recently_used_goes_first_and_no_more_than_needed(self):
        unused = [executor("a", CLIP, used_s=90), executor("b", SAM, used_s=80)]
        assert retired(decide([want()], unused, [device(free_mib=0)])) == {"b": "memory_wanted"}

    def test_ordinary_tasks_in_overflow_are_given_room_too(self):
        assert retired(decide([want(None)], [executor("a", CLIP)], [device(free_mib=0)])) == {"a": "memory_wanted"}

    def test_a_small_one_is_spared_when_the_large_one_is_needed_anyway(self):
        unused = [executor("a", CLIP, used_s=80, vram_mib=1000), executor("b", SAM, used_s=90)]
        assert retired(decide([want()], unused, [device(free_mib=0)])) == {"b": "memory_wanted"}

    def test_nobody_stops_for_room_that_would_not_be_enough(self):
        assert decide([want()], [executor("a", CLIP, vram_mib=3000)], [device(free_mib=0)]) == []

    def test_nobody_stops_while_memory_is_coming(self):
        executors = [executor("a", CLIP, phase=Phase.DRAINING), executor("b", SAM)]
        assert decide([want()], executors, [device(free_mib=0)]) == []

    def test_memory_that_is_coming_is_kept_for_the_one_who_waits_longest(self):
        # Given memory for one, coming on gpu0, when two models wait
        executors = [executor("a", SAM, phase=Phase.DRAINING), executor("b", SAM)]
        moves = decide([want(BERT, since_s=98), want(CLIP, since_s=99)], executors, [device(free_mib=0)])
        # Then the second has room made for itself
        assert retired(moves) == {"b": "memory_wanted"}

    def test_a_working_executor_yields_after_its_time_to_who_has_waited_longer(self):
        busy = executor("a", CLIP, working=True, since_s=85, held=(97.0,))
        full = [device(free_mib=0)]
        assert retired(decide([want(since_s=96)], [busy], full)) == {"a": "memory_wanted"}
        assert retired(decide([want(since_s=98)], [busy], full)) == {}
        busy = executor("a", CLIP, working=True, since_s=95, held=(97.0,))
        assert retired(decide([want(since_s=96)], [busy], full)) == {}

    def test_an_executor_whose_model_has_work_in_level_1_is_not_unused(self):
        wants = [want(BERT, since_s=98), want(CLIP, since_s=97)]
        assert retired(decide(wants, [executor("a", CLIP, since_s=99)], [device(free_mib=0)])) == {}

    def test_a_starting_executor_is_left_alone(self):
        assert decide([want()], [executor("a", CLIP, phase=Phase.STARTING)], [device(free_mib=0)]) == []


class TestOutgrown:
    def test_an_executor_too_small_for_what_waits_is_replaced(self):
        small = executor(vram_mib=3500)
        big = want(alone_mib=4000, least_mib=4000)
        assert retired(decide([big], [small], [device(free_mib=600)])) == {"a": "too_small"}

    def test_but_not_if_that_would_not_help(self):
        big = want(alone_mib=9000, least_mib=9000)
        assert decide([big], [executor(vram_mib=3500)], [device(free_mib=600)]) == []

    def test_beside_a_small_one_a_larger_one_starts_if_the_profile_allows(self):
        big = want(alone_mib=4000, least_mib=4000, max_executors=2)
        assert decide([big], [executor(vram_mib=3500, working=True)]) == [Launch(BERT, "gpu0", 6000)]


def test_a_busy_model_does_not_starve_a_rare_one_nor_the_other_way_round():
    # Given a GPU with room for one executor, a model with work at all times and one with an item now and then
    resident: list[Executor] = []
    waiting: dict[ModelKey, float] = {}
    waits: dict[ModelKey, list[float]] = {BERT: [], CLIP: []}
    served = dict.fromkeys((BERT, CLIP), 0)
    for now in range(600):
        waiting.setdefault(BERT, float(now))
        if now % 40 == 0:
            waiting.setdefault(CLIP, float(now))
        # When executors come up or stop within a second and serve what waits
        resident = [replace(each, phase=Phase.UP) for each in resident if each.phase is not Phase.DRAINING]
        for each in resident:
            if each.model in waiting:
                waits[each.model].append(now - waiting.pop(each.model))
                served[each.model] += 1
        resident = [replace(each, used_s=float(now), working=each.model is BERT) for each in resident]
        wants = [want(model, since_s) for model, since_s in waiting.items()]
        free_mib = 6000 - sum(each.vram_mib for each in resident)
        for move in decide(wants, resident, [device(free_mib=free_mib)], now=float(now)):
            match move:
                case Launch(model, _, vram_mib):
                    fresh = executor(f"{model}{now}", model, vram_mib=vram_mib, phase=Phase.STARTING)
                    resident.append(replace(fresh, since_s=float(now)))
                case Retire(id):
                    resident = [replace(each, phase=Phase.DRAINING) if each.id == id else each for each in resident]
    # Then the rare one waits for little more than the time a model may hold its memory, and the busy one works on
    assert served[CLIP] == 15
    assert max(waits[CLIP]) <= RULES.hold_s + 4
    assert served[BERT] >= 400


def test_decisions_do_not_depend_on_the_order_of_the_snapshot():
    wants = [want(BERT, since_s=98), want(CLIP, since_s=99), want(None, since_s=97)]
    executors = [executor("a", SAM), executor("b", SAM, device="gpu1", used_s=90), executor("c", SAM, used_s=90)]
    devices = [device("gpu0", 100), device("gpu1", 200)]
    assert decide(wants, executors, devices) == decide(wants[::-1], executors[::-1], devices[::-1])
