"""Messages that are taken from a worker's queue together, where something is wrong with one of them or on the way."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from brim.celery.arrivals import Arrivals, decoded
from brim.celery.envelope import HEADER, attempt_fields
from brim.store.types import ClaimAnswer

QUEUE = "gpu.n.0"


def raw_of(task_id: str, attempt: str) -> dict[str, Any]:
    header = {**attempt_fields(attempt, ["GPU-a"], "n", 1, 0), "nesting": 0, "retries": 0}
    return {"headers": {"id": task_id, "task": "t", HEADER: header}}


class Plant:
    """A worker's queue that has three messages, and who claims them."""

    key = b""

    def __init__(self, *rest: dict[str, Any], fails: bool = False) -> None:
        self.rest, self.fails = rest, fails
        self.pushed: list[Any] = []
        self.started: dict[str, bool] = {}
        self.store = SimpleNamespace(client=SimpleNamespace(rpush=lambda _, *texts: self.pushed.extend(texts)))
        self.arrivals = Arrivals(self, QUEUE, alone=True)  # type: ignore[arg-type]
        self.channel = SimpleNamespace(global_keyprefix="", connection=SimpleNamespace(_deliver=self.arrive))

    def claim_and_take(self, *_: Any) -> tuple[ClaimAnswer, list[bytes]]:
        return ClaimAnswer.GRANTED, [json.dumps(raw).encode() for raw in self.rest]

    def claim_all(self, pairs: list[tuple[str, str]]) -> list[ClaimAnswer]:
        if self.fails:
            raise ConnectionError("away")
        return [ClaimAnswer.GRANTED if task == "genuine" else ClaimAnswer.STALE for task, _ in pairs]

    def arrive(self, raw: dict[str, Any], _: str = QUEUE) -> None:
        headers = raw["headers"]
        message: Any = SimpleNamespace(headers=headers, channel=self.channel)
        attempt: Any = SimpleNamespace(attempt=headers[HEADER]["attempt"])
        self.started[headers["id"]] = self.arrivals.may_start(message, attempt)
        self.arrivals.deliver_rest(self.channel)


def test_a_message_with_anothers_attempt_does_not_take_its_claim() -> None:
    plant = Plant(raw_of("genuine", "1-2"), raw_of("forged", "1-2"))
    plant.arrive(raw_of("first", "1-1"))
    assert plant.started == {"first": True, "genuine": True, "forged": False}
    assert plant.pushed == []


def test_messages_whose_claim_fails_go_back_in_order() -> None:
    plant = Plant(raw_of("a", "1-2"), raw_of("b", "1-3"), fails=True)
    with pytest.raises(ConnectionError, match="away"):
        plant.arrive(raw_of("first", "1-1"))
    assert [json.loads(text)["headers"]["id"] for text in plant.pushed] == ["b", "a"]


def test_what_is_no_message_is_let_go() -> None:
    assert decoded([b"{}", b"nothing", b"[1]", b'{"headers": {}}'], QUEUE) == [{}, {"headers": {}}]
