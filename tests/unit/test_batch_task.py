"""Batched tasks where no model executor runs them: one call is a batch of one, and Celery notices nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

import brim
from brim.celery.batch_task import Computed, answering
from brim.celery.plugin import registration
from brim.core.batching import WrongResultCount


@pytest.fixture
def app() -> Celery:
    found = Celery("t", broker="memory://", backend="cache+memory://", set_as_current=False)
    found.conf.task_always_eager = True
    return found


def shout(items: Sequence[brim.Item]) -> list[Any]:
    return [str(item.kwargs["text"]).upper() for item in items]


def test_a_call_is_a_batch_of_one(app: Celery) -> None:
    task = app.task(base=brim.BatchTask, shared=False)(shout)
    assert task.delay(text="a").get() == "A"
    assert task(text="b") == "B"
    assert task.apply(kwargs={"text": "c"}).get() == "C"


def test_several_items_can_be_computed_by_hand(app: Celery) -> None:
    task = app.task(base=brim.BatchTask, shared=False)(shout)
    assert task.compute([brim.Item("1", [], {"text": "a"}), brim.Item("2", [], {"text": "b"})]) == ["A", "B"]


def test_an_item_that_failed_in_its_place_fails_alone(app: Celery) -> None:
    @app.task(base=brim.BatchTask, shared=False)
    def fails(items: Sequence[brim.Item]) -> list[Any]:
        return [brim.Failed(KeyError("no"))]

    with pytest.raises(KeyError, match="no"):
        fails.delay().get()


@pytest.mark.parametrize("results", [[], [1, 2]])
def test_a_wrong_number_of_results_is_told(app: Celery, results: list[int]) -> None:
    @app.task(name="miscounts", base=brim.BatchTask, shared=False)
    def task(items: Sequence[brim.Item]) -> list[int]:
        return results

    with pytest.raises(WrongResultCount, match=rf"miscounts returned {len(results)} results for one item"):
        task.delay().get()


def test_a_model_is_loaded_once_and_items_are_staged(app: Celery) -> None:
    loads = []

    def load() -> str:
        loads.append(1)
        return "the model"

    @app.task(bind=True, base=brim.BatchTask, shared=False)
    def model(self: Any, items: Sequence[brim.Item]) -> list[Any]:
        return [(self.loaded, item.staged) for item in items]

    model.load = load
    model.stage = lambda item: item.args[0] + 1
    assert [model.delay(number).get() for number in (1, 2)] == [("the model", 2), ("the model", 3)]
    assert len(loads) == 1


def test_attributes_are_the_arguments_by_name_and_what_the_header_says(app: Celery) -> None:
    @app.task(base=brim.BatchTask, shared=False)
    def attributes(items: Sequence[brim.Item]) -> list[Any]:
        return [dict(items[0].attributes)]

    attributes.call = lambda text, language="en": None
    found = attributes.apply_async(("x",), headers={"brim": {"attributes": {"tokens": 7}}}).get()
    assert found == {"text": "x", "language": "en", "tokens": 7}


def test_a_class_may_be_a_batched_task(app: Celery) -> None:
    class Doubles(brim.BatchTask):
        name = "doubles"

        def run(self, items: Sequence[brim.Item]) -> list[Any]:
            return [2 * item.args[0] for item in items]

    task = app.register_task(Doubles())
    assert task.delay(4).get() == 8


def test_autoretry_sees_what_an_item_failed_with(app: Celery) -> None:
    @app.task(base=brim.BatchTask, shared=False, autoretry_for=(KeyError,), max_retries=3)
    def fails(items: Sequence[brim.Item]) -> list[Any]:
        return [brim.Failed(KeyError("no"))]

    app.conf.task_always_eager = False
    fails.push_request(called_directly=False, id="1", is_eager=True)
    with pytest.raises(Retry):
        fails.run()


def test_within_a_batch_a_call_answers_for_the_item_that_was_computed(app: Celery) -> None:
    task = app.task(base=brim.BatchTask, shared=False)(shout)
    with answering(Computed(None)):
        assert task.run(text="a") is None
    with answering(brim.Failed(ValueError("guilty"))), pytest.raises(ValueError, match="guilty"):
        task.run(text="a")
    assert task.run(text="a") == "A"


def test_what_producers_pass_is_published_as_the_signature(app: Celery) -> None:
    task = app.task(name="shouts", base=brim.BatchTask, shared=False)(shout)
    assert registration(app)[1]["shouts"].bind("shouts", [], {"text": "a"})["text"] == "a"
    task.call = lambda text: None
    assert registration(app)[1]["shouts"].bind("shouts", ["a"], {}) == {"text": "a"}
