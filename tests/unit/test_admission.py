"""Messages that nobody should have sent: each is refused with a reason, none stops intake."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from brim.core.attributes import TaskSignature
from brim.core.profiles import ResourceTable
from brim.store.types import Peeked
from brim_services.admission import Admitter

TABLE = ResourceTable.parse('profiles:\n  t.run: {vram: "1000 * n"}\n', "table")
ADMITTER = Admitter(TABLE, {"t.run": TaskSignature.from_callable(lambda n=1: n)}, 4_194_304)
DEEP = b"[" * 100_000 + b"]" * 100_000


def encoded(body: Any) -> str:
    return base64.b64encode(body if isinstance(body, bytes) else json.dumps(body).encode()).decode()


def message(*, headers: dict[str, Any] | None = None, **parts: Any) -> bytes:
    whole: dict[str, Any] = {
        "body": encoded([[], {"n": 1}, {}]),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"id": "x", "task": "t.run", **(headers or {})},
        "properties": {"body_encoding": "base64", "delivery_tag": "t"},
    }
    return json.dumps(whole | parts).encode()


def test_the_message_that_the_others_are_made_from_is_admitted() -> None:
    assert ADMITTER.assess(Peeked("l", message())).refusal is None


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (DEEP, "malformed"),
        (b"\xff", "malformed"),
        (b"null", "malformed"),
        (message(headers={"id": "\ud800"}), "malformed"),
        (message(headers={"task": "\ud800"}), "malformed"),
        (message(headers={"retries": "2"}), "malformed"),
        (message(headers={"expires": 5}), "malformed"),
        (message(headers={"compression": []}), "compression"),
        (message(headers={"brim": {"vram_mib": 10**400}}), "bad_header"),
        (message(headers={"brim": {"vram_mib": True}}), "bad_header"),
        (message(**{"content-encoding": 7}), "malformed"),
        (message(**{"content-type": "application/x-python-serialize"}), "serializer"),
        (message(body="*"), "malformed"),
        (message(body="*", headers={"brim": {"vram_mib": 100}}), "malformed"),
        (message(body=encoded(DEEP)), "malformed"),
        (message(body=encoded([[], {"n": 10**400}, {}])), "bad_attribute"),
        (message(body=encoded([[], {"n": float("nan")}, {}])), "bad_attribute"),
        (message(body=encoded([[], {"n": -1}, {}])), "bad_attribute"),
        (message(body="x" * 5_000_000), "too_large"),
    ],
)
def test_a_message_that_cannot_be_understood_is_refused(raw: bytes, code: str) -> None:
    admission = ADMITTER.assess(Peeked("l", raw))
    assert admission.refusal is not None
    assert (admission.refusal.code, bool(admission.refusal.message)) == (code, True)
    assert admission.identity.task_id.encode()


def test_a_failure_of_brims_own_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResourceTable, "profile", lambda *_: 1 / 0)
    admission = ADMITTER.assess(Peeked("l", message()))
    assert admission.refusal is not None
    assert str(admission.refusal) == "the message could not be read: ZeroDivisionError: division by zero [unreadable]"
