"""What a producer may do with a Celery app, each as a case: a function of one side that returns what it sees.

`Twins.compare` runs a case on both sides, with and without brim; docs/compatibility.md lists the sentences.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, chord, group
from celery.canvas import StampingVisitor
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.signals import after_task_publish, before_task_publish

from support.twins import Side, seen
from support.waiting import wait_until

Case = Callable[[Side], Any]
CASES: dict[str, Case] = {}


def case(sentence: str) -> Callable[[Case], Case]:
    """Register a case by the sentence that docs/compatibility.md lists."""

    def register(function: Case) -> Case:
        CASES[sentence] = function
        return function

    return register


# -- kinds of tasks ------------------------------------------------------------------------------------------------


@case("a bound task sees its request: arguments, retries, root and parent")
def bound(side: Side) -> Any:
    return seen(side.task("bound").delay(1, 2, three=3))


@case("hooks of the team's own base class, in order: success")
def hooks_of_a_success(side: Side) -> Any:
    result = side.task("hooked").delay("succeed")
    return [seen(result), side.notes(result.id, 4)]


@case("hooks of the team's own base class, in order: failure")
def hooks_of_a_failure(side: Side) -> Any:
    result = side.task("hooked").delay("fail")
    return [seen(result), side.notes(result.id, 4)]


@case("hooks of the team's own base class, in order: retry, then success")
def hooks_of_a_retry(side: Side) -> Any:
    result = side.task("hooked").delay("retry")
    outcome, notes = seen(result), side.notes(result.id, 7)
    # The next run may begin before the one that asked for it has come to this.
    retried = "on_retry ValueError('again')"
    return [outcome, [note for note in notes if note != retried], notes.count(retried)]


@case("hooks of the team's own base class, in order: Ignore")
def hooks_of_ignore(side: Side) -> Any:
    result = side.task("hooked").delay("ignore")
    notes = side.notes(result.id, 2)
    return [notes, result.state]


@case("a base class that overrides __call__")
def overridden_call(side: Side) -> Any:
    return seen(side.task("doubled").delay(21))


@case("a class-based task (register_task)")
def class_based(side: Side) -> Any:
    return seen(side.task("by_class").delay(1, y=2))


@case("shared_task")
def shared(side: Side) -> Any:
    return [seen(side.task("shared").delay(1)), seen(side.task("shared_bound").delay(2))]


@case("autoretry_for: success at the third try")
def autoretry(side: Side) -> Any:
    result = side.task("auto").delay(2)
    return [seen(result), side.notes(result.id, 3)]


@case("autoretry_for: given up after max_retries, with the task's own exception")
def autoretry_gives_up(side: Side) -> Any:
    result = side.task("auto").delay(9)
    return [seen(result), side.notes(result.id, 3)]


@case("typing=False: wrong arguments reach the worker and fail there")
def untyped(side: Side) -> Any:
    return [seen(side.task("untyped").delay(1)), type(_error(lambda: side.task("add").delay(1))).__name__]


@case("update_state: a producer sees the progress of a running task")
def progress(side: Side) -> Any:
    gate = side.gate()
    result = side.task("progress").delay(gate)
    wait_until(lambda: result.state == "PROGRESS", what="progress", timeout_s=60)
    info = result.info
    side.open(gate)
    return [info, seen(result)]


@case("STARTED is seen while a task runs (task_track_started)")
def started(side: Side) -> Any:
    gate = side.gate()
    result = side.task("hold").delay(gate)
    wait_until(lambda: result.state == "STARTED", what="started", timeout_s=60)
    side.open(gate)
    return seen(result)


@case("Reject without requeue: no result, and it does not run again")
def rejected(side: Side) -> Any:
    result = side.task("reject").delay()
    notes = side.notes(result.id, 1)
    side.task("add").delay(1, 1).get(timeout=60)
    return [notes, side.notes(result.id, 1), result.state]


@case("soft_time_limit: caught by the task")
def soft_limit_caught(side: Side) -> Any:
    return seen(side.task("soft").delay(True))


@case("soft_time_limit: not caught")
def soft_limit(side: Side) -> Any:
    return seen(side.task("soft").delay(False))


@case("time_limit: the executor is killed and the producer gets TimeLimitExceeded")
def hard_limit(side: Side) -> Any:
    return seen(side.task("hard").delay())


@case("ignore_result: nothing is stored")
def ignored_result(side: Side) -> Any:
    result = side.task("quiet").delay()
    return [side.notes(result.id, 1), side.app.backend.get_task_meta(result.id)["status"]]


@case("AbortableTask of celery.contrib")
def abortable(side: Side) -> Any:
    gate = side.gate()
    result = side.task("abortable").delay(gate)
    side.notes(result.id, 1)
    result.abort()
    side.open(gate)
    return side.task("add").delay(1, 1).get(timeout=60)


@case("a result that cannot be serialised is the task's failure")
def unserialisable(side: Side) -> Any:
    return seen(side.task("unserialisable").delay())["state"]


@case("an exception that cannot be built again in the producer")
def unraisable(side: Side) -> Any:
    return seen(side.task("unraisable").delay())


# -- options of a call ---------------------------------------------------------------------------------------------


@case("send_task by name")
def by_name(side: Side) -> Any:
    return seen(side.app.send_task("compat.add", (1, 2)))


@case("a task id of the caller's own, custom headers, argsrepr, time limits")
def call_options(side: Side) -> Any:
    options = {"headers": {"custom": "x"}, "argsrepr": "(hidden)", "time_limit": 30, "soft_time_limit": 20}
    return seen(side.task("bound").apply_async((1,), **options))


@case("priority is in the task's delivery info")
def priority(side: Side) -> Any:
    return seen(side.task("bound").apply_async(priority=5))


@case("compression: gzip and bzip2")
def compressed(side: Side) -> Any:
    return [seen(side.task("add").apply_async(("a" * 1000, "b"), compression=name)) for name in ("gzip", "bzip2")]


@case("serializer: msgpack")
def msgpack(side: Side) -> Any:
    return seen(side.task("add").apply_async((1, 2), serializer="msgpack"))


@case("countdown and eta: not before their time")
def countdown(side: Side) -> Any:
    begun_s = time.monotonic()
    later = datetime.now(UTC) + timedelta(seconds=0.5)
    results = [side.task("add").apply_async((1, 2), countdown=0.5), side.task("add").apply_async((3, 4), eta=later)]
    return [*map(seen, results), time.monotonic() - begun_s > 0.4]


@case("expires in the past: revoked")
def expired(side: Side) -> Any:
    past = datetime.now(UTC) - timedelta(seconds=5)
    result = side.task("add").apply_async((1, 2), expires=past)
    found = seen(result)
    return [found["state"], found["value"][0]]


@case("task_routes of the app's own beside brim's: routers and mappings")
def own_routes(side: Side) -> Any:
    return [seen(side.task("plain.where").delay()), seen(side.task("plain.add").delay(1, 2))]


@case("queue= of the caller wins: the task runs in that queue's ordinary worker")
def own_queue(side: Side) -> Any:
    return seen(side.task("add").apply_async((1, 2), queue="elsewhere"))


@case("task_always_eager: runs inline")
def eager(side: Side) -> Any:
    side.app.conf.task_always_eager = True
    try:
        result = side.task("bound").delay(1)
        return [result.state, result.get()["is_eager"], (side.s("add", 1, 2) | side.s("add", 3))().get()]
    finally:
        side.app.conf.task_always_eager = False


@case("apply() runs inline")
def applied(side: Side) -> Any:
    return side.task("add").apply((1, 2)).get()


@case("the app's signals: before_task_publish, after_task_publish")
def publish_signals(side: Side) -> Any:
    heard: list[str] = []

    def before(sender: str, **_: Any) -> None:
        heard.append(f"before {sender}")

    def after(sender: str, **_: Any) -> None:
        heard.append(f"after {sender}")

    before_task_publish.connect(before)
    after_task_publish.connect(after)
    try:
        found = seen(side.task("add").delay(1, 2))
    finally:
        before_task_publish.disconnect(before)
        after_task_publish.disconnect(after)
    return [found, heard]


@case("signals in the worker: prerun, postrun, success")
def success_signals(side: Side) -> Any:
    result = side.task("signalled").delay("succeed")
    return [seen(result), side.notes(result.id, 3)]


@case("signals in the worker: failure")
def failure_signals(side: Side) -> Any:
    result = side.task("signalled").delay("fail")
    return [seen(result), side.notes(result.id, 3)]


@case("signals in the worker: retry")
def retry_signals(side: Side) -> Any:
    result = side.task("signalled").delay("retry")
    return [seen(result), sorted(side.notes(result.id, 6))]


# -- results -------------------------------------------------------------------------------------------------------


@case("a failure: exception, traceback, state; get(propagate=False)")
def failure(side: Side) -> Any:
    result = side.task("fail").delay("exactly this")
    found = seen(result)
    return [found, repr(result.get(propagate=False)), "raise ValueError(text)" in result.traceback]


@case("get(timeout=...) of a task that takes longer")
def timeout(side: Side) -> Any:
    gate = side.gate()
    result = side.task("hold").delay(gate)
    error = _error(lambda: result.get(timeout=0.2))
    side.open(gate)
    return [isinstance(error, CeleryTimeout), seen(result)]


@case("result_extended: name, arguments, retries and worker's answer in the result's meta")
def extended(side: Side) -> Any:
    result = side.task("add").apply_async((1, 2))
    result.get(timeout=60)
    return [result.name, result.args, result.kwargs, result.retries]


@case("forget() drops the result")
def forgotten(side: Side) -> Any:
    result = side.task("add").delay(1, 2)
    result.get(timeout=60)
    result.forget()
    return result.state


@case("a task's children are those that it published")
def children(side: Side) -> Any:
    result = side.task("spawn").delay(3)
    result.get(timeout=60)
    return [seen(result), sorted(value for _, value in result.collect() if isinstance(value, int))]


@case("revoke of a task that waits")
def revoked_waiting(side: Side) -> Any:
    gate = side.gate()
    holders = [side.task("hold").delay(gate) for _ in range(4)]
    wait_until(lambda: holders[1].state == "STARTED", what="the executors are taken", timeout_s=60)
    victim = side.task("add").delay(1, 2)
    victim.revoke()
    time.sleep(0.2)
    side.open(gate)
    found = seen(victim)
    return [found["state"], found["value"][0], [seen(holder)["value"] for holder in holders]]


@case("revoke(terminate=True) of a task that runs")
def revoked_running(side: Side) -> Any:
    result = side.task("hold").delay(side.gate())
    wait_until(lambda: result.state == "STARTED", what="it runs", timeout_s=60)
    result.revoke(terminate=True, signal="SIGKILL")
    found = seen(result)
    return [found["state"], found["value"][0]]


# -- Celery's canvas -----------------------------------------------------------------------------------------------


@case("chain")
def chained(side: Side) -> Any:
    result = chain(side.s("add", 2, 2), side.s("add", 4), side.s("add", 8))()
    return [seen(result), seen(result.parent)["value"], seen(result.parent.parent)["value"]]


@case("chain whose second task fails: the third never runs, parents are seen")
def chain_fails(side: Side) -> Any:
    result = chain(side.s("add", 1, 1), side.si("fail"), side.s("add", 1))()
    # get() raises as soon as a parent has failed; what was never run is marked a moment later.
    wait_until(result.ready, what="the third is marked", timeout_s=60)
    return [seen(result.parent), seen(result.parent.parent)["value"], seen(result)]


@case("chain with link_error: the errback is called once with request, exception, traceback")
def chain_errback(side: Side) -> Any:
    label = side.gate()
    result = chain(side.s("add", 1, 1), side.si("fail")).apply_async(link_error=side.s("error_note", of=label))
    return [seen(result), side.notes(label, 1)]


@case("link_error of the old style, with the id alone")
def old_errback(side: Side) -> Any:
    label = side.gate()
    result = side.task("fail").apply_async(link_error=side.s("old_error_note", of=label))
    return [seen(result), side.notes(label, 1)]


@case("link: each callback gets the result")
def linked(side: Side) -> Any:
    label = side.gate()
    callbacks = [side.s("note", of=label), side.s("add", 16).on_error(side.s("error_note", of=label))]
    result = side.task("add").apply_async((2, 2), link=callbacks)
    return [seen(result), side.notes(label, 1)]


@case("retry and replace: by a task, by a task without profile, by a chain, by a chord")
def replaced(side: Side) -> Any:
    return [
        seen(side.task("replace").delay(side.s("add", 1, 2))),
        seen(side.task("replace").delay(side.task("plain.add").s(1, 2))),
        seen(side.task("replace").delay(side.s("replace", side.s("add", 3, 4)))),
        seen(side.task("replace_by_chord").delay(4)),
        seen(side.task("chain_in_task").delay(5)),
    ]


@case("replace inside a chain and inside a chord: what follows gets the replacement's result")
def replaced_inside(side: Side) -> Any:
    inner = side.s("replace", side.s("add", 1, 2))
    return [
        seen(chain(inner, side.s("add", 10))()),
        seen(chord([inner, side.s("add", 5, 5)])(side.s("total"))),
    ]


@case("replace by a task that fails: errback and exception are the replacement's")
def replaced_by_failure(side: Side) -> Any:
    label = side.gate()
    result = side.task("replace").apply_async((side.s("fail", "inner"),), link_error=side.s("error_note", of=label))
    return [seen(result), side.notes(label, 1)]


@case("group: results in order, successful(), completed_count()")
def grouped(side: Side) -> Any:
    result = group(side.s("add", i, i) for i in range(10))()
    return [result.get(timeout=60), result.successful(), result.completed_count(), seen(result)]


@case("group with a failing member")
def group_fails(side: Side) -> Any:
    result = group(side.s("add", 1, 1), side.s("fail"), side.s("add", 2, 2))()
    values = result.get(timeout=60, propagate=False)
    return [list(map(repr, values)), result.failed(), result.completed_count()]


@case("a saved group is restored by its id")
def group_saved(side: Side) -> Any:
    result = group(side.s("add", i, i) for i in range(3))()
    result.save()
    restored = type(result).restore(result.id, app=side.app)
    return restored.get(timeout=60)


@case("chord")
def chorded(side: Side) -> Any:
    return seen(chord(side.s("add", i, i) for i in range(10))(side.s("total")))


@case("chord of members with and without a profile")
def mixed_chord(side: Side) -> Any:
    members = [side.s("add", 1, 1), side.task("plain.add").s(2, 2), side.s("add", 3, 3)]
    return seen(chord(members)(side.s("total")))


@case("chord with a failing member: ChordError for the body, its errback is called")
def chord_fails(side: Side) -> Any:
    label = side.gate()
    body = side.s("total").on_error(side.s("error_note", of=label))
    result = chord([side.s("add", 1, 1), side.s("fail"), side.s("add", 2, 2)])(body)
    found = seen(result)
    return [found["state"], found["value"][0], "on purpose" in found["value"][1], len(side.notes(label, 1)) >= 1]


@case("chord of one, of none, and of chords")
def chords_of_few(side: Side) -> Any:
    inner = chord([side.s("add", 1, 1), side.s("add", 2, 2)], side.s("total"))
    return [
        seen(chord([side.s("add", 1, 1)])(side.s("total")))["value"],
        chord([])(side.s("total")).get(timeout=60),
        chord([inner, inner])(side.s("total")).get(timeout=60),
    ]


@case("add_to_chord from inside a member")
def grown_chord(side: Side) -> Any:
    return chord([side.s("grow_chord", 1), side.s("grow_chord", 5)])(side.s("total")).get(timeout=60)


@case("canvas nested three deep: chain of group of chain of chord")
def nested(side: Side) -> Any:
    innermost = chord([side.s("add", 1), side.s("add", 2)], side.s("total"))
    middle = chain(side.s("add", 1), innermost)
    work = chain(side.s("add", 1, 1), group(middle, middle, side.s("add", 100)), side.s("total"), side.s("add", 1000))
    return work().get(timeout=60)


@case("group | task becomes a chord; group in a chain; partial and immutable signatures")
def upgraded(side: Side) -> Any:
    work = group(side.s("add", 1, 1), side.s("add", 2, 2)) | side.s("total") | side.si("add", 7, 7)
    return seen(work())


@case("map, starmap and chunks")
def mapped(side: Side) -> Any:
    add = side.task("add")
    return [
        side.task("shared").map([1, 2, 3]).apply_async().get(timeout=60),
        add.starmap([(1, 2), (3, 4)]).apply_async().get(timeout=60),
        add.chunks([(i, i) for i in range(6)], 2).apply_async().get(timeout=60),
    ]


@case("a signature that went through JSON, and clone with new options")
def from_json(side: Side) -> Any:
    import json

    copy = json.loads(json.dumps(side.s("add", 2)))
    return seen(side.app.signature(copy).clone((3,)).apply_async())


class Stamp(StampingVisitor):
    """Stamps every signature that it meets."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"shift": "night", "stamped_headers": ["shift"]}


@case("stamping: each task of a stamped canvas sees its stamps")
def stamped(side: Side) -> Any:
    work = chord([side.s("bound", 1), side.s("bound", 2)], side.s("bound"))
    work.stamp(visitor=Stamp())
    return seen(work.apply_async())


@case("a group of 100: all results, in order")
def large_group(side: Side) -> Any:
    result = group(side.s("add", i, 1) for i in range(100))()
    return result.get(timeout=120) == list(range(1, 101))


def _error(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the case compares it)
        call()
    return caught.value
