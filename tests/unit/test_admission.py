"""What a message asks to be run, and what that needs: pure, from an envelope to a demand."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest

from brim.celery.envelope import MalformedMessage, Prepared, attempt_fields, join, parse, sign, split
from brim.core.attributes import TaskSignature
from brim.core.profiles import ResourceTable, size_class
from brim.store.types import Peeked
from brim_services.admission import Admitter, Known, work_of

TABLE = ResourceTable.parse('profiles: {t.cut: {vram: "100 * n", context_mib: 300, margin: 1.0}}', "table")
SIGNATURES = {"t.cut": TaskSignature.from_callable(lambda n, *, m=1: n)}
ADMITTER = Admitter(TABLE, SIGNATURES, 100_000)


def message(task: str, args: list[Any], kwargs: dict[str, Any], content_type: str = "application/json") -> bytes:
    body = [args, kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    packed = content_type == "application/x-msgpack"
    data = msgpack.packb(body) if packed else json.dumps(body).encode()
    envelope = {
        "body": base64.b64encode(data).decode(),
        "content-type": content_type,
        "content-encoding": "binary" if packed else "utf-8",
        "headers": {"id": "i1", "task": task, "retries": 0},
        "properties": {"delivery_tag": "d", "body_encoding": "base64", "priority": 0},
    }
    return json.dumps(envelope).encode()


def repeated(how: str, items: list[Any]) -> bytes:
    return message(how, [], {"task": {"task": "t.cut", "args": [], "kwargs": {}}, "it": items})


def test_msgpack_is_read_like_json() -> None:
    by_json = ADMITTER.assess(Peeked("q", message("t.cut", [7], {})))
    by_msgpack = ADMITTER.assess(Peeked("q", message("t.cut", [7], {}, "application/x-msgpack")))
    assert by_json.refusal is by_msgpack.refusal is None
    assert by_msgpack.demand == by_json.demand


@pytest.mark.parametrize(
    ("raw", "calls"),
    [
        (message("t.cut", [1], {"m": 2}), [([1], {"m": 2})]),
        (repeated("celery.map", [1, [2]]), [([1], {}), ([[2]], {})]),
        (repeated("celery.starmap", [[1], [2]]), [([1], {}), ([2], {})]),
        (repeated("celery.map", []), []),
    ],
)
def test_map_and_starmap_are_calls_of_the_task_they_repeat(raw: bytes, calls: list[Any]) -> None:
    assert work_of(parse(raw)) == ("t.cut", calls)


def test_a_starmap_needs_what_its_largest_call_needs() -> None:
    found = ADMITTER.assess(Peeked("q", repeated("celery.starmap", [[1], [9], [3]])))
    alone = ADMITTER.assess(Peeked("q", message("t.cut", [9], {})))
    assert (found.task, found.demand, found.lane) == ("t.cut", alone.demand, alone.lane)


def test_an_empty_map_needs_a_context() -> None:
    found = ADMITTER.assess(Peeked("q", repeated("celery.map", [])))
    assert found.refusal is None
    assert 300 <= found.demand.vram_mib < 320


def test_an_unknown_signature_is_waited_for_under_the_repeated_tasks_name() -> None:
    found = Admitter(TABLE, {}, 100_000).assess(Peeked("q", repeated("celery.map", [1])))
    assert (found.lane, found.waits_for is not None) == ("?t.cut", True)


@pytest.mark.parametrize("kwargs", [{}, {"task": "t.cut", "it": [1]}, {"task": {"task": "t.cut"}, "it": 5}])
def test_a_map_that_celery_did_not_make_is_refused(kwargs: dict[str, Any]) -> None:
    raw = message("celery.map", [], kwargs)
    with pytest.raises(MalformedMessage, match=r"not the arguments of celery\.map"):
        work_of(parse(raw))
    found = ADMITTER.assess(Peeked("q", raw))
    assert found.refusal is not None
    assert (found.refusal.code, found.task, found.identity.task_id) == ("malformed", "celery.map", "i1")


def test_the_unlocking_of_a_chord_needs_next_to_nothing() -> None:
    found = ADMITTER.assess(Peeked("q", message("celery.chord_unlock", ["g", {}], {})))
    assert (found.refusal, found.demand.vram_mib) == (None, 16)


class Teaches:
    """Stands for what peaks have taught."""

    def __init__(self, mib: float | None) -> None:
        self.mib = mib

    def reserve_mib(self, summands: Sequence[float], declared_mib: float, gpu_models: Sequence[str]) -> float | None:
        return self.mib


@pytest.mark.parametrize(
    ("unknown", "learned_mib", "vram_mib"),
    [("exclusive", None, 9000), ("exclusive", 3000, 9000), ("learn", None, 9000), ("learn", 3000, 3000)],
)
def test_a_task_without_a_profile_may_have_a_gpu_to_itself_and_be_learned_from(
    unknown: Any, learned_mib: float | None, vram_mib: int
) -> None:
    signatures = {"t.new": TaskSignature.from_callable(lambda n: n)}
    admitter = Admitter(TABLE, signatures, 100_000, {"t.new": Teaches(learned_mib)}, unknown, gpu_mib=10_000)

    found = admitter.assess(Peeked("q", message("t.new", [7], {})))

    assert found.refusal is None
    assert found.demand.vram_mib == size_class(vram_mib)
    assert found.demand.whole == (vram_mib == 9000)
    told = found.explanation
    assert (told["profile"], told["formula_id"]) == ("t.new", admitter.stand_in("t.new").formula_id)


def test_what_is_known_of_a_like_task_holds_for_the_same_values_profile_and_learning_only() -> None:
    known: Known = {}

    def reserved(args: list[Any], table: ResourceTable = TABLE, learned: dict[str, Any] | None = None) -> Any:
        admitter = Admitter(table, SIGNATURES, 100_000, learned or {}, known=known)
        return admitter.assess(Peeked("q", message("t.cut", args, {}))).explanation

    first = reserved([7])
    assert reserved([7]) == first
    assert len(known) == 1
    assert [type(reserved([n])["attributes"]["n"]) for n in (1, 1.0)] == [int, float]
    assert reserved([8])["vram_mib"] > first["vram_mib"]
    other = ResourceTable.parse('profiles: {t.cut: {vram: "200 * n", context_mib: 300, margin: 1.0}}', "table")
    assert reserved([7], other)["vram_mib"] > first["vram_mib"]
    assert reserved([7], learned={"t.cut": Teaches(3000)})["suggested_mib"] == 3000
    assert reserved([7]) == first


def test_a_task_without_a_profile_is_refused_or_waits_for_a_gpu_to_be_known() -> None:
    raw = message("t.new", [7], {})
    refused = ADMITTER.assess(Peeked("q", raw))
    assert refused.refusal is not None
    assert refused.refusal.code == "no_profile"
    assert Admitter(TABLE, SIGNATURES, 100_000, unknown="learn").assess(Peeked("q", raw)).waits_for is not None


def test_with_a_key_admission_seals_messages_and_believes_no_unsigned_attempt() -> None:
    key = b"k" * 32
    admitter = Admitter(TABLE, SIGNATURES, 100_000, key=key)
    sealed = admitter.assess(Peeked("q", message("t.cut", [7], {})))
    fields = attempt_fields("1-1", ["GPU-a"], "n1", 1000, 300)
    genuine = Prepared(sealed.head, sealed.tail), "tag", sign(fields, "i1", key)
    forged = split(parse(message("t.cut", [7], {}))), "tag", fields

    assert b'"seal"' in sealed.head
    assert b'"seal"' not in ADMITTER.assess(Peeked("q", message("t.cut", [7], {}))).head
    assert admitter.assess(Peeked("q", join(*genuine))).own_attempt
    assert not admitter.assess(Peeked("q", join(*forged))).own_attempt
    assert key.decode() not in repr(admitter)
