"""The whole path of batched tasks: real services, a real agent, real model executors on simulated devices."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from celery.result import AsyncResult

from brim.celery.errors import TaskRejected
from brim.core.batching import Phase
from brim.core.model import TERMINAL, State
from brim_services.invariants import check_invariants
from support.agent import ROOT, Bench
from support.waiting import wait_until

APP = "support.apps.batch"

TABLE = """
defaults: {context_mib: 300, margin: 1.0}
profiles:
  embed: {model: enc, weights_mib: 1024, batch: {max_items: 8, per_unit_mib: 10, level1_limit: 60}}
  staged: {model: tok, version: "2", batch: {max_items: 4, shape_bucket: bucket}, defaults: {bucket: 0}}
  hungry: {model: big, batch: {max_items: 8, per_unit_mib: 20}}
  bulk: {model: many, batch: {max_items: 32}}
  retrying: {model: enc2, batch: {max_items: 4, keep_warm_s: 0}}
  plain: {vram: mib}
"""


@dataclass
class World(Bench):
    """A node with one device of 8 GiB, intake and placement."""

    def open(self) -> None:
        """Start everything."""
        self.store.resign("test")
        for name in ("intake", "placement"):
            self.service(name)
        self.serve(app=APP)

    def send(self, task: str = "embed", **options: Any) -> AsyncResult:
        headers = {"headers": {"brim": {"attributes": options.pop("attributes")}}} if "attributes" in options else {}
        expires = {"expires": options.pop("expires")} if "expires" in options else {}
        return self.app.send_task(task, kwargs=options, queue="brim.intake", **headers, **expires)

    def noted(self, event: str = "batch", task: str | None = None) -> list[dict[str, Any]]:
        """What the tasks' functions have written down."""
        path = self.folder / "batches"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == event and line.get("task") == task]

    def batch_of(self, text: str, task: str | None = None) -> list[str]:
        """The first batch that an item was computed in."""
        found = [line["texts"] for line in self.noted(task=task) if text in line["texts"]]
        return list(found[0]) if found else []

    @contextmanager
    def computing(self, text: str, task: str | None = None) -> Iterator[AsyncResult]:
        """An item by itself is computed for as long as the block lasts; what is sent in it gathers behind that."""
        go = self.folder / f"{text}.go"
        first = self.send(task or "embed", text=text, until=str(go))
        wait_until(lambda: self.batch_of(text, task), what="the first batch is computed", timeout_s=60)
        try:
            yield first
        finally:
            go.touch()

    def is_gathered(self, *results: AsyncResult) -> bool:
        """Whether these are in the spare set and staged there; one that is full is sealed ahead."""
        staged, gathered = {line["id"] for line in self.noted("staged")}, (State.PLACED, State.RUNNING)
        return all(self.state(result) in gathered and str(result.id) in staged for result in results)

    def gathered(self, *results: AsyncResult) -> None:
        """Wait until that is so."""
        wait_until(lambda: self.is_gathered(*results), what="the items are in the spare set", timeout_s=60)

    def expired(self, result: AsyncResult) -> bool:
        """Whether its time is over, by the server's clock."""
        record = self.store.record(str(result.id))
        return record is not None and (record.expires_s or math.inf) < self.store.server_ms() / 1000

    def state(self, result: AsyncResult) -> State | None:
        """None while intake has not seen it."""
        record = self.store.record(str(result.id))
        return record.state if record is not None else None

    def settled(self) -> None:
        """Wait until every task has ended, and nothing breaks an invariant."""
        wait_until(lambda: not check_invariants(self.store, settled=True), what="everything has settled", timeout_s=30)


@pytest.fixture(scope="module")
def make(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(name: str, table: str = TABLE, devices: str = "sim:1x8GiB", **settings: str) -> World:
        folder = tmp_path_factory.mktemp(name)
        (folder / "resources.yaml").write_text(table)
        more: Mapping[str, str] = {
            "BRIM_RESOURCES__TABLE": str(folder / "resources.yaml"),
            "BRIM_PLACEMENT__POLICY_FILE": str(ROOT / "configs/placement.yaml"),
            "BRIM_TEST_BATCHES": str(folder / "batches"),
            **settings,
        }
        world = World(valkey_url, f"t{os.getpid()}{name}:", folder, devices=devices, executors=1, settings=more)
        made.append(world)
        world.open()
        return world

    yield make
    for world in made:
        world.close()


@pytest.fixture(scope="module")
def shared(make: Callable[..., World]) -> World:
    """A world that several tests use one after the other, each with texts of its own."""
    return make("shared")


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    shared.settled()


def test_items_are_computed_together_and_each_has_its_own_result(world: World) -> None:
    results = [world.send(text=f"a{n}", seconds=0.2) for n in range(20)]
    assert [result.get(timeout=60) for result in results] == [f"a{n}!" for n in range(20)]
    world.settled()
    assert {world.state(result) for result in results} == {State.SUCCEEDED}
    batches = [line["texts"] for line in world.noted() if line["texts"][0].startswith("a")]
    assert sum(map(len, batches)) == 20
    assert max(map(len, batches)) == 8
    assert len(world.noted("load")) == 1
    [view] = [view for view in world.store.executors() if view.model == "enc"]
    assert (view.phase, view.queue) == (Phase.UP, "gpu.n1.0.enc")
    assert world.measured_mib() >= 1024


def test_only_the_guilty_fail(world: World) -> None:
    texts = [f"b{n}" for n in range(12)] + ["guilty-b1", "bad-b2", "guilty-b3"]
    results = {text: world.send(text=text, seconds=0.1) for text in texts}
    for text, result in results.items():
        if text.startswith("b") and not text.startswith("bad"):
            assert result.get(timeout=60) == f"{text}!"
    with pytest.raises(ValueError, match="guilty-b1"):
        results["guilty-b1"].get(timeout=60)
    with pytest.raises(KeyError, match="bad-b2"):
        results["bad-b2"].get(timeout=60)
    with pytest.raises(ValueError, match="guilty-b3"):
        results["guilty-b3"].get(timeout=60)
    world.settled()
    reason = world.record(str(results["guilty-b1"].id)).reason
    assert reason is not None
    assert (reason.code, reason.message) == ("failed", "ValueError: guilty-b1")


def test_items_of_a_chain_a_group_and_a_chord_go_on_as_ever(world: World) -> None:
    from celery import chain, chord, group

    app = world.app
    embed = app.signature("embed", kwargs={"text": "c1"}, queue="brim.intake")
    again = app.signature("embed", kwargs={"text": "c2"}, immutable=True, queue="brim.intake")
    assert chain(embed, again).apply_async().get(timeout=60) == "c2!"
    many = group(app.signature("embed", kwargs={"text": f"c{n}"}, queue="brim.intake") for n in range(3, 6))
    body = app.signature("embed", kwargs={"text": "c6"}, immutable=True, queue="brim.intake")
    assert chord(many, body).apply_async().get(timeout=60) == "c6!"


def test_items_are_staged_beside_the_batch_that_is_computed_and_shapes_are_kept_apart(world: World) -> None:
    with world.computing("D0", "staged") as first:
        results = [world.send("staged", text=f"d{n}", attributes={"bucket": n % 2}) for n in range(1, 5)]
        pairs = results[::2], results[1::2]
        wait_until(lambda: all(map(world.state, results)), what="all are admitted", timeout_s=60)
        wait_until(lambda: any(world.is_gathered(*pair) for pair in pairs), what="one shape is in the spare set")
        broken = world.send("staged", text="unstageable")
    assert [result.get(timeout=30) for result in (first, *results)] == ["D0", "D1", "D2", "D3", "D4"]
    assert sorted(world.batch_of("D1", "staged")) == ["D1", "D3"]
    assert sorted(world.batch_of("D2", "staged")) == ["D2", "D4"]
    with pytest.raises(ValueError, match="cannot be staged"):
        broken.get(timeout=30)


def test_an_item_that_expires_while_it_waits_is_never_computed(world: World) -> None:
    with world.computing("e0"):
        late = world.send(text="e1", expires=0.5)
        fine = world.send(text="e2")
        wait_until(lambda: world.expired(late), what="it has expired")
    with pytest.raises(TaskRevokedError):
        late.get(timeout=30)
    assert world.state(late) is State.EXPIRED
    assert fine.get(timeout=30) == "e2!"
    assert world.batch_of("e1") == []


def test_an_item_that_is_revoked_while_it_is_staged_is_never_computed(world: World) -> None:
    with world.computing("f0"):
        revoked, fine = world.send(text="f1"), world.send(text="f2")
        world.gathered(revoked)
        world.app.control.revoke(revoked.id)
        with pytest.raises(TaskRevokedError):
            revoked.get(timeout=30)
    assert fine.get(timeout=30) == "f2!"
    assert world.batch_of("f1") == []
    assert world.state(revoked) is State.CANCELLED


def test_an_executor_killed_in_the_middle_of_a_batch_puts_all_its_items_back(world: World) -> None:
    go = world.folder / "go"
    with world.computing("g"):
        sealed = [world.send(text=f"g{n}", until=str(go)) for n in range(3)]
        world.gathered(*sealed)
    wait_until(lambda: all(world.state(item) is State.RUNNING for item in sealed), what="they run", timeout_s=60)
    spare = world.send(text="g9")
    world.gathered(spare)
    [view] = [view for view in world.store.executors() if view.model == "enc"]
    os.kill(int(view.proc.partition(".")[0]), signal.SIGKILL)
    go.touch()
    assert [item.get(timeout=60) for item in sealed] == ["g0!", "g1!", "g2!"]
    assert spare.get(timeout=30) == "g9!"
    world.settled()
    assert [world.record(str(item.id)).losses for item in (*sealed, spare)] == [1, 1, 1, 0]


def test_a_hard_time_limit_ends_its_item_and_the_others_are_computed_again(world: World) -> None:
    with world.computing("k0"):
        kwargs = {"text": "k1", "seconds": 30.0}
        slow = world.app.send_task("embed", kwargs=kwargs, queue="brim.intake", time_limit=1.0)
        fine = world.send(text="k2")
        world.gathered(slow, fine)
    with pytest.raises(TimeLimitExceeded):
        slow.get(timeout=30)
    assert fine.get(timeout=60) == "k2!"
    world.settled()
    assert world.state(slow) is State.FAILED
    assert world.record(str(fine.id)).losses == 0


def test_level_1_is_bounded(world: World) -> None:
    with world.computing("h0"):
        results = [world.send(text=f"h{n}") for n in range(1, 9)]
        world.gathered(*results)
        results += [world.send(text=f"h{n}") for n in range(9, 76)]  # 60 wait, 7 are too many
        with pytest.raises(TaskRejected, match="level1_full"):
            results[-1].get(timeout=30)
    world.settled()
    states = [world.state(result) for result in results]
    assert (states.count(State.DEAD), states.count(State.SUCCEEDED)) == (7, 68)
    assert set(states[68:]) == {State.DEAD}


def test_a_batch_that_runs_out_of_memory_is_halved_and_the_next_is_smaller(world: World) -> None:
    with world.computing("i", "hungry") as first:
        results = [world.send("hungry", text=f"i{n}") for n in range(8)]
        world.gathered(*results)
    sizes = [result.get(timeout=60) for result in (first, *results)]
    assert max(sizes) <= 4  # eight would take 12,000 MiB of a device that has 8,192
    [view] = [view for view in world.store.executors() if view.model == "big"]
    assert view.ceiling is not None
    assert view.ceiling < 8


def test_an_unused_executor_makes_room_for_an_ordinary_task(world: World) -> None:
    result = world.send("plain", mib=7200)
    assert result.get(timeout=60) == "done"
    events = [(line["event"], line.get("reason", {}).get("code")) for line in world.store.residency()]
    assert ("draining", "memory_wanted") in events
    assert [view.model for view in world.store.executors()] == []


def test_an_item_retries_by_itself(world: World) -> None:
    results = [world.send("retrying", text=f"j{n}") for n in range(3)]
    assert [result.get(timeout=60) for result in results] == ["second time"] * 3
    world.settled()
    assert [world.record(str(result.id)).identity.retries for result in results] == [1, 1, 1]


def test_of_many_items_exactly_the_guilty_fail(world: World) -> None:
    exactly_the_guilty_fail(world, 300)


@pytest.mark.large
@pytest.mark.timeout(600)
def test_of_ten_thousand_items_exactly_the_guilty_fail(world: World) -> None:
    exactly_the_guilty_fail(world, 10_000)


def exactly_the_guilty_fail(world: World, count: int) -> None:
    """One item in a hundred is guilty, and fails; all others have their results."""
    results = [world.send("bulk", number=number) for number in range(count)]
    ids = [str(result.id) for result in results]

    def ended(some: list[str]) -> bool:
        records = world.store.records(some)
        return len(records) == len(some) and all(record.state in TERMINAL for record in records)

    wait_until(lambda: ended(ids[-32:]) and ended(ids), what="all have ended", timeout_s=30 + count / 25)
    states = {record.task_id: record.state for record in world.store.records(ids)}
    failed = [number for number, task_id in enumerate(ids) if states[task_id] is not State.SUCCEEDED]
    assert failed == list(range(7, count, 100))
    assert {states[ids[number]] for number in failed} == {State.FAILED}
    assert [results[number].get(timeout=10) for number in (0, 6, 8, count - 1)] == [0, 6, 8, count - 1]
    with pytest.raises(ValueError, match="107 is guilty"):
        results[107].get(timeout=10)
