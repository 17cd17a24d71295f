"""Messages that are taken from a worker's queue together, where something is wrong with one of them or on the way."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from brim.celery.arrivals import Arrivals, attempt_of, decoded
from brim.celery.envelope import HEADER, attempt_fields
from brim.store.types import ClaimAnswer

QUEUE = "gpu.n.0"


def raw_of(task_id: str, attempt: str) -> dict[str, Any]:
    header = {**attempt_fields(attempt, ["GPU-a"], "n", 1, 0), "nesting": 0, "retries": 0}
    return {"headers": {"id": task_id, "task": "t", HEADER: header}}


class Plant:
    """A worker's queue in which messages lie behind the one that has come, and who claims them."""

    def __init__(self, *rest: dict[str, Any], key: bytes = b"", outage: int = 0) -> None:
        self.rest, self.key, self.outage = list(rest), key, outage
        self.pushed: list[Any] = []
        self.begun: list[str] = []
        self.claims: list[list[str]] = []
        self.store = SimpleNamespace(client=SimpleNamespace(rpush=lambda _, *texts: self.pushed.extend(texts)))
        self.arrivals = Arrivals(self, QUEUE, alone=True)  # type: ignore[arg-type]
        self.channel = SimpleNamespace(global_keyprefix="", connection=SimpleNamespace(_deliver=self.arrive))

    def claim_and_take(self, pairs: list[tuple[str, str]], *_: Any) -> tuple[list[ClaimAnswer], list[bytes]]:
        rest, self.rest = self.rest, []
        return self.claim_all(pairs), [json.dumps(raw).encode() for raw in rest]

    def claim_all(self, pairs: list[tuple[str, str]]) -> list[ClaimAnswer]:
        self.claims.append([task_id for task_id, _ in pairs])
        return [ClaimAnswer.STALE if task_id == "stale" else ClaimAnswer.GRANTED for task_id, _ in pairs]

    def arrive(self, raw: dict[str, Any], _: str = QUEUE) -> None:
        if len(self.begun) == self.outage != 0:
            raise ConnectionError("away")
        headers = raw["headers"]
        message: Any = SimpleNamespace(headers=headers, channel=self.channel)
        attempt = attempt_of(headers)
        assert attempt is not None
        if self.arrivals.accept(message, attempt):
            self.begun.append(headers["id"])
        self.arrivals.settle()


def test_what_has_come_is_begun_before_it_is_claimed_and_brings_the_rest_along() -> None:
    plant = Plant(raw_of("second", "1-2"), raw_of("third", "1-3"))
    plant.arrive(raw_of("first", "1-1"))
    assert plant.begun == ["first", "second", "third"]
    assert plant.claims == [["first"], ["second", "third"]]
    assert plant.pushed == []


def test_the_start_claim_comes_first_where_the_worker_answers_itself() -> None:
    """What lies in the queue stays there then: it is not known when this message has been dealt with."""
    plant = Plant(raw_of("second", "1-2"))
    first = raw_of("first", "1-1")
    attempt = attempt_of(first["headers"])
    assert attempt is not None
    message: Any = SimpleNamespace(headers=first["headers"], channel=plant.channel)

    assert plant.arrivals.accept(message, attempt)
    plant.arrivals.claim()
    assert plant.claims == [["first"]]
    plant.arrivals.settle()
    assert plant.begun == []

    plant.arrive(raw_of("next", "1-3"))
    assert plant.begun == ["next", "second"]
    assert plant.claims == [["first"], ["next"], ["second"]]


def test_a_claim_that_an_outage_strikes_is_made_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Plant()
    monkeypatch.setattr(plant, "claim_and_take", Mock(side_effect=ConnectionError("away")))
    with pytest.raises(ConnectionError, match="away"):
        plant.arrive(raw_of("first", "1-1"))
    monkeypatch.undo()
    plant.arrive(raw_of("second", "1-2"))
    assert plant.claims == [["first", "second"]]


def test_a_refused_claim_keeps_nobody_elses_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="brim.worker")
    plant = Plant(raw_of("stale", "1-2"), raw_of("third", "1-3"))
    plant.arrive(raw_of("first", "1-1"))
    assert "attempt 1-2 of stale may not start: stale" in caplog.messages
    assert plant.claims == [["first"], ["stale", "third"]]


def test_messages_behind_one_that_an_outage_strikes_go_back_in_order() -> None:
    plant = Plant(raw_of("second", "1-2"), *(raw_of(name, f"1-{name}") for name in "abc"), outage=2)
    with pytest.raises(ConnectionError, match="away"):
        plant.arrive(raw_of("first", "1-1"))
    assert plant.begun == ["first", "second"]
    assert [json.loads(text)["headers"]["id"] for text in plant.pushed] == ["c", "b"]


def test_what_is_no_message_is_let_go() -> None:
    assert decoded([b"{}", b"nothing", b"[1]", b'{"headers": {}}'], QUEUE) == [{}, {"headers": {}}]
