"""The store's transitions against a real server: given a state, when a script runs, then records and books agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from brim.core.model import AttemptView, Demand, Identity, Node, Reason, State
from brim.store import FencedError, Store
from brim.store.types import (
    Admission,
    AdmitAnswer,
    ClaimAnswer,
    CloseAnswer,
    Commit,
    CommitAnswer,
    DeviceFigures,
    DeviceRegistration,
    EndAnswer,
    LoseAnswer,
    MemoryReport,
    NodeRegistration,
    Outcome,
    OutOfMemoryAnswer,
    Peeked,
)
from brim_services.invariants import check_invariants

GPU = "GPU-a"
WHY = Reason("test", "because the test says so")


class Cluster:
    """A store with one node, one 10,000 MiB device with two executors, and an elected placement."""

    def __init__(self, store: Store, namespace: str) -> None:
        self.store, self.list = store, f"{namespace}brim.intake"
        self.numbers = itertools.count(1)
        self.breaches: list[str] = []
        self.epoch, _ = store.elect("test", 60)
        registration = NodeRegistration(
            Node("n1"), "boot", 2, ["t"], {"t": "{}"}, [DeviceRegistration(GPU, 0, "SIM", 10_000, 500)]
        )
        assert store.register_node(registration)

    def publish(self, task_id: str, retries: int = 0) -> Peeked:
        raw = f'{{"id":"{task_id}","retries":{retries},"tag":{next(self.numbers)}}}'.encode()
        self.store.client.lpush(self.list, raw)
        return Peeked(self.list, raw)

    def admit(self, task_id: str, vram_mib: int = 3000, retries: int = 0, **more: object) -> AdmitAnswer:
        source = self.publish(task_id, retries)
        fields = {"lane": f"t|{vram_mib}", "demand": Demand(vram_mib), "context_mib": 300, "priority": 5}
        admission = Admission(source, Identity(task_id, 0, retries), "t", head=b"<", tail=b">", **(fields | more))  # type: ignore[arg-type]
        return self.store.admit([admission])[0]

    def place(self, task_id: str, vram_mib: int = 3000, ahead: int = 0) -> tuple[str, str]:
        attempt = f"{self.epoch}-{next(self.numbers)}"
        commit = Commit(task_id, f"t|{vram_mib}", attempt, [GPU], "n1", f"{self.list}.gpu", vram_mib, b"slot")
        return attempt, self.store.commit(self.epoch, [commit], ahead)[0].status

    def run(self, task_id: str, proc: str = "10.1", vram_mib: int = 3000) -> str:
        attempt, status = self.place(task_id, vram_mib)
        assert status == "committed"
        assert self.store.claim(task_id, attempt, "w1") is ClaimAnswer.GRANTED
        assert self.store.bind(task_id, attempt, [GPU], proc).answer is ClaimAnswer.GRANTED
        return attempt

    def state(self, task_id: str) -> State:
        record = self.store.record(task_id)
        assert record is not None
        return record.state

    def view(self, attempt: str) -> AttemptView:
        return next(v for v in self.store.books([GPU])[0] if v.attempt == attempt)

    @property
    def available(self) -> int:
        return self.store.devices()[0].available_mib

    def report(self, used: int, processes: dict[str, int | None]) -> bool:
        figures = DeviceFigures(total_mib=10_000, used_mib=used, free_mib=10_000 - used, processes=processes)
        sampled = self.store.server_ms() + 1
        return self.store.report(MemoryReport(node="n1", boot="boot", sampled_ms=sampled, devices={GPU: figures}))


@pytest.fixture
def cluster(valkey_url: str, namespace: str) -> Iterator[Cluster]:
    client = redis.Redis.from_url(valkey_url)
    found = Cluster(Store(client, f"{namespace}brim:"), namespace)
    yield found
    assert check_invariants(found.store, settled=False) == found.breaches
    client.close()


def woken(store: Store) -> bool:
    """Whether placement has been woken since it last asked."""
    return store.client.lpop(store.keys.wake) is not None


def test_a_task_runs_from_admission_to_its_end(cluster: Cluster) -> None:
    assert cluster.admit("a") is AdmitAnswer.ADMITTED
    assert cluster.store.queue_lengths([cluster.list]) == {cluster.list: 0}

    attempt = cluster.run("a")

    assert cluster.available == 9500 - 3000
    assert cluster.store.client.lpop(f"{cluster.list}.gpu") == b"<slot>"
    assert cluster.store.finish("a", attempt, "10.1") is ClaimAnswer.GRANTED
    outcome = Outcome(State.SUCCEEDED, leftover_mib=[400], context_mib=300, peak_mib=2500)
    assert cluster.store.end("a", attempt, [GPU], outcome) is EndAnswer.ENDED
    assert cluster.store.end("a", attempt, [GPU], outcome) is EndAnswer.STALE
    assert cluster.state("a") is State.SUCCEEDED
    assert cluster.available == 9500 - 400
    events = [line["event"] for line in cluster.store.story("a")]
    assert events == ["admitted", "placed", "claimed", "started", "finishing", "succeeded"]


def test_a_message_is_admitted_once_and_redeliveries_are_dropped(cluster: Cluster) -> None:
    source = cluster.publish("a")
    admission = Admission(source, Identity("a", 0, 0), "t", "t|1", Demand(1), 0, 0, b"<", b">")
    assert cluster.store.admit([admission, admission]) == [AdmitAnswer.ADMITTED, AdmitAnswer.GONE]
    assert cluster.admit("a", 1) is AdmitAnswer.REDELIVERY
    assert cluster.admit("b", own_attempt=True) is AdmitAnswer.ORPHAN


def test_a_retry_that_arrives_early_is_held_and_promoted_by_the_end(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    cluster.store.finish("a", attempt, "10.1")

    assert cluster.admit("a", retries=1) is AdmitAnswer.HELD
    assert cluster.store.end("a", attempt, [GPU], Outcome(State.HANDED_OVER)) is EndAnswer.PROMOTED

    assert cluster.state("a") is State.HANDED_OVER
    assert cluster.store.queue_lengths([cluster.list]) == {cluster.list: 1}


def test_a_retry_after_the_end_is_a_new_run(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    cluster.store.end("a", attempt, [GPU], Outcome(State.HANDED_OVER, leftover_mib=[0]))
    assert cluster.admit("a", retries=1) is AdmitAnswer.ADMITTED
    record = cluster.store.record("a")
    assert record is not None
    assert (record.state, record.run, record.identity.retries) == (State.WAITING, 2, 1)


def test_a_commit_that_does_not_fit_is_refused_with_the_short_resource(cluster: Cluster) -> None:
    for task_id in "abc":
        cluster.admit(task_id, 4000)
    assert cluster.place("a", 4000)[1] == "committed"
    cluster.admit("d", 6000)
    commit = Commit("d", "t|6000", "x", [GPU], "n1", "q", 6000, b"")
    answer = cluster.store.commit(cluster.epoch, [commit], 0)[0]
    assert (answer.status, answer.short, answer.missing) == ("refused", "memory", 500)
    assert cluster.place("b", 4000)[1] == "committed"
    commit = Commit("c", "t|4000", "x", [GPU], "n1", "q", 4000, b"")
    assert cluster.store.commit(cluster.epoch, [commit], 1)[0].short == "memory"
    assert cluster.store.commit(cluster.epoch, [commit], 0, ignore_memory=True)[0].short == "executors"
    assert cluster.place("a", 4000)[1] == "stale"


def test_a_placement_that_ignores_memory_is_found_out(cluster: Cluster) -> None:
    for task_id in "ab":
        cluster.admit(task_id, 6000)
    assert cluster.place("a", 6000)[1] == "committed"
    commit = Commit("b", "t|6000", "x", [GPU], "n1", "q", 6000, b"")
    assert cluster.store.commit(cluster.epoch, [commit], 0, ignore_memory=True)[0].status == "committed"
    assert cluster.store.commit(cluster.epoch, [commit], 0)[0].status == "committed", "asked again"
    cluster.breaches = ["no over-commit: 12000 MiB were reserved at once on n1.0, which has 9500"]


def test_a_stale_placement_is_fenced(cluster: Cluster) -> None:
    cluster.admit("a")
    old = cluster.epoch
    cluster.store.resign("test")
    assert cluster.store.elect("other", 60)[0] == old + 1
    assert cluster.place("a")[1] == "fenced"
    with pytest.raises(FencedError):
        cluster.store.take_changes(old, 10)


@pytest.mark.parametrize("claim_first", [True, False])
def test_the_start_claim_and_the_bind_come_in_either_order(cluster: Cluster, claim_first: bool) -> None:
    cluster.admit("a")
    attempt, _ = cluster.place("a")
    store = cluster.store
    steps = [
        lambda: store.claim("a", attempt, "w1"),
        lambda: store.bind("a", attempt, [GPU], "10.1", boot="w1").answer,
    ]
    assert [step() for step in (steps if claim_first else reversed(steps))] == [ClaimAnswer.GRANTED] * 2

    assert [line["event"] for line in store.story("a")] == ["admitted", "placed", "claimed", "started"]
    view = cluster.view(attempt)
    assert (view.state, view.boot, view.proc) == (State.RUNNING, "w1", "10.1")
    assert view.claimed_s is not None
    assert store.claim("a", attempt, "w2") is ClaimAnswer.STALE


def test_a_process_without_a_worker_binds_only_what_is_claimed(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt, _ = cluster.place("a")
    assert cluster.store.bind("a", attempt, [GPU], "10.1").answer is ClaimAnswer.STALE


def test_only_the_live_attempt_may_claim_bind_and_finish(cluster: Cluster) -> None:
    cluster.admit("a")
    first = cluster.run("a")
    assert cluster.store.bind("a", first, [GPU], "11.1").answer is ClaimAnswer.STALE
    assert cluster.store.lose(cluster.view(first), WHY, counts=True, max_attempts=3) is LoseAnswer.WAITING
    assert cluster.store.finish("a", first, "10.1") is ClaimAnswer.STALE
    assert cluster.store.end("a", first, [GPU], Outcome(State.SUCCEEDED)) is EndAnswer.STALE
    second = cluster.run("a", "12.1")
    assert second != first
    assert cluster.store.claim("a", first, "w1") is ClaimAnswer.STALE
    assert cluster.store.claim("missing", first, "w1") is ClaimAnswer.UNKNOWN


def test_a_task_lost_too_often_is_dead_lettered_and_answered(cluster: Cluster) -> None:
    cluster.admit("a")
    for _ in range(2):
        attempt = cluster.run("a")
        answer = cluster.store.lose(cluster.view(attempt), WHY, counts=True, max_attempts=2)
    assert answer is LoseAnswer.DEAD
    owed = cluster.store.owed(10)
    assert [(o.task_id, o.state, o.reason, o.head) for o in owed] == [("a", State.DEAD, WHY, b"<")]
    cluster.store.answered(owed[0])
    assert cluster.store.owed(10) == []


def test_a_lost_attempts_process_keeps_its_memory_until_it_is_gone(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    assert not cluster.store.process_gone(GPU, "10.1")
    cluster.store.lose(cluster.view(attempt), WHY, counts=True, max_attempts=3)
    assert cluster.available == 9500 - 3000
    assert cluster.store.process_gone(GPU, "10.1")
    assert cluster.available == 9500


def test_an_attempt_that_has_gone_on_since_it_was_given_up_is_not_lost(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt, _ = cluster.place("a")
    placed = cluster.view(attempt)
    cluster.store.claim("a", attempt, "w1")
    cluster.store.bind("a", attempt, [GPU], "10.1")
    running = cluster.view(attempt)
    cluster.store.finish("a", attempt, "10.1")
    for seen in (placed, running):  # its result may be out by now
        assert cluster.store.lose(seen, WHY, counts=False, max_attempts=3) is LoseAnswer.STALE
    assert cluster.store.lose(cluster.view(attempt), WHY, counts=False, max_attempts=3) is LoseAnswer.WAITING


def test_reports_count_external_memory_and_leftovers(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    assert cluster.report(4000, {"10.1": 3500})
    assert cluster.available == 9500 - 500 - 3500
    cluster.store.end("a", attempt, [GPU], Outcome(State.SUCCEEDED, context_mib=300))
    assert cluster.available == 9500 - 500 - 3500, "unknown leftover: what it counted for stays"
    cluster.report(1000, {"10.1": None})
    assert cluster.store.devices()[0].committed_mib == 300, "still unknown after the end: the context"
    cluster.report(1000, {"10.1": 600})
    assert (cluster.store.devices()[0].committed_mib, cluster.store.devices()[0].external_mib) == (600, 400)


def test_an_old_sample_says_nothing_about_a_process_that_ended_since(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    sampled = cluster.store.server_ms()
    cluster.store.end("a", attempt, [GPU], Outcome(State.SUCCEEDED, leftover_mib=[200]))
    figures = DeviceFigures(total_mib=10_000, used_mib=2900, free_mib=7100, processes={"10.1": 2900})
    cluster.store.report(MemoryReport(node="n1", boot="boot", sampled_ms=sampled, devices={GPU: figures}))
    device = cluster.store.devices()[0]
    assert (device.committed_mib, device.external_mib) == (200, 0)


def test_idle_leftover_is_reclaimed_by_replacing_its_process(cluster: Cluster) -> None:
    cluster.report(900, {"10.1": 500, "11.1": 400})
    assert cluster.store.devices()[0].reclaimable_mib == 900
    assert cluster.store.doom(cluster.epoch, GPU, 300) == 1
    assert cluster.store.books([GPU])[1] == {GPU: {"10.1": True, "11.1": False}}
    cluster.admit("a")
    attempt, _ = cluster.place("a")
    cluster.store.claim("a", attempt, "w1")
    assert cluster.store.bind("a", attempt, [GPU], "10.1").answer is ClaimAnswer.DOOMED
    assert cluster.store.lose(cluster.view(attempt), WHY, counts=False, max_attempts=1) is LoseAnswer.WAITING


@pytest.mark.parametrize("stage", ["scheduled", "waiting", "placed", "claimed", "handed_over"])
def test_a_task_that_does_not_run_is_cancelled_at_once(cluster: Cluster, stage: str) -> None:
    eta = cluster.store.server_ms() / 1000 + 60 if stage == "scheduled" else None
    cluster.admit("a", eta_s=eta)
    if stage in ("placed", "claimed"):
        attempt, _ = cluster.place("a")
        if stage == "claimed":
            cluster.store.claim("a", attempt, "w1")
    if stage == "handed_over":
        cluster.store.end("a", cluster.run("a"), [GPU], Outcome(State.HANDED_OVER, leftover_mib=[0]))
    assert cluster.state("a") == stage
    assert cluster.store.cancel("a", WHY) is CloseAnswer.CLOSED
    assert cluster.state("a") is State.CANCELLED
    assert cluster.available == 9500
    assert len(cluster.store.owed(10)) == 1
    assert cluster.store.cancel("a", WHY) is CloseAnswer.REFUSED
    assert cluster.store.cancel("b", WHY) is CloseAnswer.UNKNOWN
    if stage == "claimed":
        assert cluster.store.bind("a", attempt, [GPU], "10.1").answer is ClaimAnswer.CANCELLED


def test_a_running_task_is_marked_and_ends_cancelled(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    assert cluster.store.cancel("a", WHY) is CloseAnswer.MARKED
    record = cluster.store.record("a")
    assert record is not None
    assert record.cancelling
    assert cluster.store.lose(cluster.view(attempt), WHY, counts=True, max_attempts=3) is LoseAnswer.CANCELLED


def test_a_scheduled_task_waits_for_its_eta(cluster: Cluster) -> None:
    now = cluster.store.server_ms() / 1000
    cluster.admit("late", eta_s=now + 60)
    cluster.admit("soon", eta_s=now + 0.05)
    while not cluster.store.release_due(10):
        pass
    assert (cluster.state("late"), cluster.state("soon")) == (State.SCHEDULED, State.WAITING)
    assert cluster.store.look([], 1).next_eta_s == pytest.approx(now + 60, abs=0.01)


def test_a_refusal_is_a_record_with_a_reason_and_an_answer(cluster: Cluster) -> None:
    assert cluster.admit("a", refusal=WHY) is AdmitAnswer.REFUSED
    record = cluster.store.record("a")
    assert record is not None
    assert (record.state, record.reason) == (State.DEAD, WHY)
    assert cluster.store.owed(1)[0].reason == WHY


def test_overflow_is_ordered_by_priority_and_then_age(cluster: Cluster) -> None:
    for task_id, priority in [("a", 5), ("b", 5), ("c", 0), ("d", 9), ("e", 5)]:
        cluster.admit(task_id, priority=priority)
    windows = cluster.store.snapshot(10).lanes
    assert [i for i, _, _ in windows[0].waiting] == ["c", "a", "b", "e", "d"]
    assert windows[0].waiting[1][2] == pytest.approx(cluster.store.server_ms() / 1000, abs=5)


def test_commits_of_one_call_see_what_those_before_them_reserve(cluster: Cluster) -> None:
    ids = ["a", "b", "c", "d", "gone"]
    for task_id in ids[:-1]:
        cluster.admit(task_id)
    batch = [Commit(i, "t|3000", f"x-{i}", [GPU], "n1", f"{cluster.list}.gpu", 3000, b"", 0.5, 10) for i in ids]

    answers = cluster.store.commit(cluster.epoch, batch, 1)

    assert [answer.status for answer in answers] == ["committed"] * 3 + ["refused", "stale"]
    assert (answers[3].short, answers[3].uuid, answers[3].missing) == ("memory", GPU, 2500)
    assert cluster.available == 500
    assert (cluster.store.devices()[0].cpus_used, cluster.store.devices()[0].ram_used_mib) == (1.5, 30)
    assert cluster.store.counts() == {State.WAITING: 1, State.PLACED: 3}
    assert cluster.store.lane_depths() == {"t|3000": 1}
    assert cluster.store.commit(cluster.epoch - 1, batch, 1) == [CommitAnswer("fenced")] * 5


def test_more_than_one_call_of_the_script_are_one_round_trip(cluster: Cluster) -> None:
    ids = [f"t{number}" for number in range(40)]
    sources = [cluster.publish(task_id) for task_id in ids]
    admissions = [
        Admission(source, Identity(i, 0, 0), "t", "t|100", Demand(100), 0, 5, b"<", b">")
        for i, source in zip(ids, sources, strict=True)
    ]
    assert cluster.store.admit(admissions) == [AdmitAnswer.ADMITTED] * 40
    assert cluster.store.lane_ids("t|100", 100) == ids
    batch = [Commit(i, "t|100", f"x-{i}", [GPU], "n1", f"{cluster.list}.gpu", 100, b"") for i in ids]
    answers = cluster.store.commit(cluster.epoch, batch, 28)
    assert [answer.status for answer in answers] == ["committed"] * 30 + ["refused"] * 10
    assert {answer.short for answer in answers[30:]} == {"executors"}


def test_placement_is_not_woken_by_its_own_commits_but_hears_of_them(cluster: Cluster) -> None:
    cluster.admit("a")
    assert woken(cluster.store)
    cluster.store.take_changes(cluster.epoch, 10)
    assert cluster.place("a")[1] == "committed"
    assert not cluster.store.client.exists(cluster.store.keys.wake)
    assert [d.busy for d in cluster.store.take_changes(cluster.epoch, 10).devices] == [1]


def test_the_audit_finds_sums_that_differ_from_the_book(cluster: Cluster) -> None:
    cluster.admit("a")
    cluster.run("a")
    keys, client = cluster.store.keys, cluster.store.client
    right = client.hget(keys.book(GPU), "p:10.1")
    client.hset(keys.book(GPU), "p:10.1", b"-1|0|0|0|0|2999")
    [difference] = cluster.store.audit()
    assert "2999 MiB are noted as reserved for process 10.1, 3000 are" in difference
    client.hset(keys.book(GPU), "p:10.1", right)
    wrong = client.hget(keys.availability, GPU).replace(b'"busy":1', b'"busy":2')
    client.hset(keys.availability, GPU, wrong)
    assert any("busy is 2 in the table, 1 by its book" in found for found in cluster.store.audit())
    assert any("its entry in the table is not the one in its book" in found for found in cluster.store.audit())
    client.hset(keys.book(GPU), "entry", wrong)
    assert cluster.store.set_device_state("n1", "boot", [GPU], "up"), "who reads all of the book sums it up anew"


def test_a_book_of_an_earlier_version_is_read_as_a_whole(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    keys, client = cluster.store.keys, cluster.store.client
    client.hset(keys.book(GPU), "p:10.1", b"-1|0|0|0|0")
    client.hdel(keys.book(GPU), "entry")
    outcome = Outcome(State.SUCCEEDED, leftover_mib=[400])
    assert cluster.store.end("a", attempt, [GPU], outcome) is EndAnswer.ENDED
    assert cluster.available == 9500 - 400


def test_placement_hears_what_changed(cluster: Cluster) -> None:
    assert woken(cluster.store)
    first = cluster.store.take_changes(cluster.epoch, 10)
    assert ([d.uuid for d in first.devices], [n.node.name for n in first.nodes]) == ([GPU], ["n1"])
    assert cluster.store.tasksets({first.devices[0].tasks}) == {first.devices[0].tasks: frozenset({"t"})}
    cluster.admit("a")
    cluster.admit("b")
    second = cluster.store.take_changes(cluster.epoch, 1)
    assert [(w.lane, w.depth, len(w.waiting)) for w in second.lanes] == [("t|3000", 2, 1)]
    assert cluster.store.take_changes(cluster.epoch, 1).lanes == []


def test_a_silent_node_is_lost_and_its_boot_is_refused(cluster: Cluster) -> None:
    node = cluster.store.snapshot(1).nodes[0]
    assert cluster.store.renew("n1", "boot")
    assert not cluster.store.renew("n1", "other")
    assert not cluster.store.lose_node(cluster.epoch, node, 60)
    while not cluster.store.lose_node(cluster.epoch, node, 0):
        pass
    assert cluster.store.devices()[0].state == "lost"
    assert cluster.store.nodes()[0].state == "lost"
    assert not cluster.store.renew("n1", "boot")
    assert not cluster.store.set_device_state("n1", "boot", [GPU], "up")
    assert cluster.store.devices()[0].state == "lost"


def test_devices_may_begin_quarantined(cluster: Cluster) -> None:
    device = DeviceRegistration("GPU-b", 0, "SIM", 1000, 0)
    node = NodeRegistration(Node("n2", {"zone": "a"}), "boot2", 1, [], {}, [device], state="quarantined")
    assert cluster.store.register_node(node)
    assert [(d.node, d.state) for d in cluster.store.devices()] == [("n1", "up"), ("n2", "quarantined")]
    assert [(n.node.labels, n.boot, n.devices) for n in cluster.store.nodes()] == [
        ({}, "boot", [GPU]),
        ({"zone": "a"}, "boot2", ["GPU-b"]),
    ]
    assert cluster.store.set_device_state("n2", "boot2", ["GPU-b"], "up")
    assert cluster.store.devices()[1].state == "up"


def test_a_node_leaves_only_when_nothing_runs_on_it(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    assert not cluster.store.leave("n1", "boot")
    cluster.store.end("a", attempt, [GPU], Outcome(State.FAILED, WHY))
    assert cluster.store.leave("n1", "boot")
    assert cluster.store.devices() == []


def test_finished_records_are_forgotten_after_their_retention(cluster: Cluster) -> None:
    cluster.admit("a")
    cluster.store.end("a", cluster.run("a"), [GPU], Outcome(State.SUCCEEDED))
    assert cluster.store.forget_finished(60, 10) == 0
    while not cluster.store.forget_finished(0, 10):
        pass
    assert cluster.store.record("a") is None
    assert cluster.store.counts() == {}


def test_every_script_is_loaded_again_after_a_flush(cluster: Cluster) -> None:
    cluster.store.client.script_flush()
    assert cluster.admit("a") is AdmitAnswer.ADMITTED


@pytest.mark.parametrize("stage", ["handed_over", "running"])
def test_a_cancelled_task_has_no_next_run(cluster: Cluster, stage: str) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    if stage == "handed_over":
        cluster.store.end("a", attempt, [GPU], Outcome(State.HANDED_OVER, leftover_mib=[0]))
        assert cluster.store.cancel("a", WHY) is CloseAnswer.CLOSED
    else:
        assert cluster.store.cancel("a", WHY) is CloseAnswer.MARKED
        cluster.store.finish("a", attempt, "10.1")
        assert cluster.admit("a", retries=1) is AdmitAnswer.HELD
        assert cluster.store.end("a", attempt, [GPU], Outcome(State.HANDED_OVER, leftover_mib=[0])) is EndAnswer.ENDED

    record = cluster.store.record("a")
    assert record is not None
    assert (record.state, record.reason) == (State.CANCELLED, WHY)
    assert [owed.reason for owed in cluster.store.owed(10)] == [WHY]
    assert cluster.admit("a", retries=2) is AdmitAnswer.CLOSED
    assert cluster.store.queue_lengths([cluster.list]) == {cluster.list: 0}


def test_a_newer_run_takes_the_place_of_one_that_waits(cluster: Cluster) -> None:
    now = cluster.store.server_ms() / 1000
    cluster.admit("a", expires_s=now + 0.01)
    attempt = cluster.run("a")
    cluster.store.finish("a", attempt, "10.1")
    cluster.store.lose(cluster.view(attempt), WHY, counts=True, max_attempts=3)  # its retry is on the way

    assert cluster.admit("a", 4000, retries=1) is AdmitAnswer.ADMITTED

    assert cluster.store.lane_depths() == {"t|4000": 1}
    assert cluster.store.expired_ids(10) == []
    assert cluster.place("a", 4000)[1] == "committed"


def test_of_several_messages_the_newest_run_is_held(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    assert cluster.admit("a", retries=2) is AdmitAnswer.HELD
    assert cluster.admit("a", retries=1) is AdmitAnswer.REDELIVERY
    assert cluster.admit("a", retries=2) is AdmitAnswer.REDELIVERY
    cluster.store.end("a", attempt, [GPU], Outcome(State.HANDED_OVER))
    assert b'"retries":2' in cluster.store.client.lrange(cluster.list, 0, -1)[0]


@pytest.mark.parametrize("stage", ["placed", "running", "finishing"])
def test_a_lost_attempt_gives_way_to_a_newer_run_wherever_it_was(cluster: Cluster, stage: str) -> None:
    cluster.admit("a")
    attempt = cluster.place("a")[0] if stage == "placed" else cluster.run("a")
    if stage == "finishing":
        cluster.store.finish("a", attempt, "10.1")
    cluster.admit("a", retries=1)
    assert cluster.store.lose(cluster.view(attempt), WHY, counts=True, max_attempts=1) is LoseAnswer.PROMOTED
    assert cluster.state("a") is State.HANDED_OVER
    assert cluster.store.queue_lengths([cluster.list]) == {cluster.list: 1}


def test_a_lost_attempt_that_was_to_be_cancelled_is_answered_with_that_reason(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    cluster.store.cancel("a", WHY)
    cluster.admit("a", retries=1)
    died = Reason("executor_died", "executor 10.1 was killed")
    assert cluster.store.lose(cluster.view(attempt), died, counts=True, max_attempts=1) is LoseAnswer.CANCELLED
    assert [owed.reason for owed in cluster.store.owed(10)] == [WHY]


def test_a_task_that_ran_when_it_expired_expires_when_it_waits_again(cluster: Cluster) -> None:
    cluster.admit("a", expires_s=cluster.store.server_ms() / 1000 - 1)
    attempt = cluster.run("a")
    assert cluster.store.expired_ids(10) == ["a"]
    assert cluster.store.close("a", State.EXPIRED, WHY, [State.WAITING]) is CloseAnswer.REFUSED
    assert cluster.store.expired_ids(10) == []
    cluster.store.lose(cluster.view(attempt), WHY, counts=True, max_attempts=3)
    assert cluster.store.expired_ids(10) == ["a"]


def test_a_process_to_be_replaced_is_told_so_however_often_it_asks(cluster: Cluster) -> None:
    cluster.report(500, {"10.1": 500})
    cluster.store.doom(cluster.epoch, GPU, 300)
    cluster.admit("a")
    attempt, _ = cluster.place("a")
    cluster.store.claim("a", attempt, "w1")
    for _ in range(2):
        assert cluster.store.bind("a", attempt, [GPU], "10.1").answer is ClaimAnswer.DOOMED


def test_no_more_processes_are_replaced_than_cover_what_is_short(cluster: Cluster) -> None:
    cluster.report(900, {"10.1": 500, "11.1": 400})
    assert cluster.store.doom(cluster.epoch, GPU, 300) == 1
    assert cluster.store.doom(cluster.epoch, GPU, 300) == 0
    assert cluster.store.doom(cluster.epoch, GPU, 600) == 1


def test_only_one_of_executor_and_main_process_may_answer(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    assert cluster.store.finish("a", attempt, "") is ClaimAnswer.GRANTED, "about to kill it: hard time limit"
    assert cluster.store.finish("a", attempt, "10.1") is ClaimAnswer.STALE
    assert cluster.store.finish("a", attempt, "") is ClaimAnswer.GRANTED
    cluster.store.end("a", attempt, [GPU], Outcome(State.FAILED, WHY, [0]))

    cluster.admit("b")
    attempt = cluster.run("b")
    assert cluster.store.finish("b", attempt, "10.1") is ClaimAnswer.GRANTED
    assert cluster.store.finish("b", attempt, "") is ClaimAnswer.STALE
    assert cluster.store.finish("b", attempt, "", left_to_main=True) is ClaimAnswer.GRANTED
    assert cluster.store.finish("b", attempt, "10.1") is ClaimAnswer.STALE


def test_a_leftover_that_is_known_stays_where_reports_do_not_tell(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    cluster.store.end("a", attempt, [GPU], Outcome(State.SUCCEEDED, leftover_mib=[1200], context_mib=300))
    cluster.report(1200, {"10.1": None})
    device = cluster.store.devices()[0]
    assert (device.committed_mib, device.external_mib) == (1200, 0)


def test_an_end_of_one_of_several_attempts_of_a_process_frees_nothing_unseen(cluster: Cluster) -> None:
    cluster.admit("a")
    cluster.admit("b")
    first, _ = cluster.run("a"), cluster.run("b")
    cluster.store.end("a", first, [GPU], Outcome(State.SUCCEEDED, context_mib=300))
    assert cluster.available == 9500 - 6000
    cluster.report(3500, {"10.1": 3500})
    assert cluster.available == 9500 - 3500


def test_what_others_use_is_not_taken_for_memory_of_a_process_that_cannot_be_measured(cluster: Cluster) -> None:
    cluster.report(2000, {"10.1": None})
    assert cluster.store.devices()[0].external_mib == 2000
    cluster.admit("a")
    attempt = cluster.run("a")
    cluster.report(2100, {"10.1": None})
    assert cluster.available == 9500 - 2000 - 3000, "the task has not taken its memory yet"
    cluster.report(6000, {"10.1": None})
    assert cluster.available == 9500 - 3000 - 3000, "more than both: others use more than before"
    cluster.store.end("a", attempt, [GPU], Outcome(State.SUCCEEDED, context_mib=300))
    cluster.report(800, {"10.1": None})
    assert cluster.available == 9500 - 500 - 300


def test_a_record_is_kept_until_its_producer_is_answered(cluster: Cluster) -> None:
    cluster.admit("a", refusal=WHY)
    assert not cluster.store.purge("a")
    assert not cluster.store.revive("a", "?t", WHY)
    cluster.store.answered(cluster.store.owed(1)[0])
    assert cluster.store.revive("a", "?t", WHY)
    cluster.store.close("a", State.DEAD, WHY, [State.WAITING])
    cluster.store.answered(cluster.store.owed(1)[0])
    assert cluster.store.purge("a")


def test_placement_waits_for_changes_and_reads_them_in_one_round_trip(cluster: Cluster) -> None:
    cluster.store.take_changes(cluster.epoch, 10)
    woken(cluster.store)
    assert cluster.store.take_changes(cluster.epoch, 10, wait_s=0.01).lanes == []
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(cluster.store.take_changes, cluster.epoch, 10, wait_s=20.0)
        cluster.admit("a")
        changes = waiting.result(10)
    assert [task for window in changes.lanes for task, _, _ in window.waiting] == ["a"]
    assert not woken(cluster.store)


def test_changes_beyond_the_limit_ring_again(cluster: Cluster) -> None:
    cluster.admit("a")
    assert woken(cluster.store)
    cluster.store.take_changes(cluster.epoch, 10, limit=1)
    assert woken(cluster.store)


def test_a_stale_placement_neither_closes_nor_gives_up_anything(cluster: Cluster) -> None:
    cluster.admit("a")
    view = cluster.view(cluster.run("a"))
    cluster.admit("b")
    with pytest.raises(FencedError):
        cluster.store.close("b", State.DEAD, WHY, [State.WAITING], epoch=cluster.epoch - 1)
    with pytest.raises(FencedError):
        cluster.store.lose(view, WHY, counts=True, max_attempts=1, epoch=cluster.epoch - 1)
    assert (cluster.state("a"), cluster.state("b")) == (State.RUNNING, State.WAITING)


def test_a_device_that_a_new_registration_lacks_leaves_the_table(cluster: Cluster) -> None:
    other = DeviceRegistration("GPU-b", 0, "SIM", 8000, 0)
    assert cluster.store.register_node(NodeRegistration(Node("n1"), "boot2", 2, ["t"], {}, [other]))
    assert [device.uuid for device in cluster.store.devices()] == ["GPU-b"]
    cluster.store.take_changes(cluster.epoch, 10)


def test_a_retry_that_never_comes_is_known(cluster: Cluster) -> None:
    cluster.admit("a")
    cluster.store.end("a", cluster.run("a"), [GPU], Outcome(State.HANDED_OVER, leftover_mib=[0]))
    while not cluster.store.awaited_ids(0, 10):
        pass
    assert cluster.store.awaited_ids(60, 10) == []
    cluster.admit("a", retries=1)
    assert cluster.store.awaited_ids(0, 10) == []


ESTIMATE = {"profile": "t", "summands": [2800.0], "formula_id": "f"}


def test_the_end_of_an_attempt_tells_its_peak_to_the_learner(cluster: Cluster) -> None:
    cluster.admit("a", explanation=ESTIMATE)
    attempt = cluster.run("a")
    cluster.store.sampled([("a", attempt, 2100)])
    cluster.store.end("a", attempt, [GPU], Outcome(State.SUCCEEDED, peak_mib=2500))

    assert cluster.store.story("a")[-1]["peak_mib"] == 2500
    [peak] = cluster.store.peaks(10)
    assert (peak.task_id, peak.gpu_model, peak.reserved_mib, peak.peak_mib) == ("a", "SIM", 3000, 2500)
    assert (peak.out_of_memory, peak.estimate) == (False, ESTIMATE)


def test_where_no_framework_counts_the_samples_have_the_word(cluster: Cluster) -> None:
    cluster.admit("a", explanation=ESTIMATE)
    attempt = cluster.run("a")
    cluster.store.sampled([("a", attempt, 2100), ("a", "1-0", 9000)])
    cluster.store.end("a", attempt, [GPU], Outcome(State.FAILED, Reason("out_of_memory", "too much")))

    record = cluster.store.record("a")
    assert record is not None
    assert record.peak_mib == 2100
    assert [peak.out_of_memory for peak in cluster.store.peaks(10)] == [True]


def test_a_peak_that_nobody_saw_is_unknown_and_teaches_nothing(cluster: Cluster) -> None:
    cluster.admit("a", explanation=ESTIMATE)
    attempt = cluster.run("a")
    cluster.store.end("a", attempt, [GPU], Outcome(State.SUCCEEDED))

    record = cluster.store.record("a")
    assert record is not None
    assert record.peak_mib is None
    assert cluster.store.peaks(10) == []


def test_a_loss_tells_a_peak_only_if_the_attempt_outgrew_its_reservation(cluster: Cluster) -> None:
    for task_id, code, told in (("a", "outgrew", [3600]), ("b", "executor_died", [])):
        cluster.admit(task_id, explanation=ESTIMATE)
        attempt = cluster.run(task_id)
        cluster.store.sampled([(task_id, attempt, 3600)])
        [view] = [view for view in cluster.store.books([GPU])[0] if view.task_id == task_id]
        cluster.store.lose(view, Reason(code, "for the test"), counts=True, max_attempts=3)
        peaks = cluster.store.peaks(10)
        assert [(peak.peak_mib, peak.out_of_memory) for peak in peaks] == [(mib, True) for mib in told]
        cluster.store.keep_learned(cluster.epoch, len(peaks), {})
        cluster.store.process_gone(GPU, "10.1")


def test_running_out_of_memory_tells_what_was_wanted(cluster: Cluster) -> None:
    cluster.admit("a", explanation=ESTIMATE)
    attempt = cluster.run("a")
    why = Reason("oom", "for the test")
    answer = cluster.store.out_of_memory("a", attempt, [GPU], "10.1", "t|4500", Demand(4500), 300, why, 3, 4400)
    assert answer is OutOfMemoryAnswer.WAITING
    assert [(peak.peak_mib, peak.out_of_memory) for peak in cluster.store.peaks(10)] == [(4400, True)]
    assert cluster.store.story("a")[-1]["peak_mib"] == 4400


def test_a_sample_that_comes_after_the_end_changes_nothing(cluster: Cluster) -> None:
    cluster.admit("a")
    attempt = cluster.run("a")
    cluster.store.end("a", attempt, [GPU], Outcome(State.SUCCEEDED))
    cluster.store.sampled([("a", attempt, 2100)])
    assert cluster.store.client.hget(cluster.store.keys.task("a"), "sampled_mib") is None


def test_what_was_learned_is_kept_with_its_peaks_taken_off_or_not_at_all(cluster: Cluster) -> None:
    for name in "abc":
        cluster.admit(name, explanation=ESTIMATE)
        cluster.store.end(name, cluster.run(name), [GPU], Outcome(State.SUCCEEDED, leftover_mib=[0], peak_mib=100))

    cluster.store.keep_learned(cluster.epoch, 2, {"t": b"state"})

    assert [peak.task_id for peak in cluster.store.peaks(10)] == ["c"]
    assert cluster.store.calibrations() == {"t": b"state"}
    assert cluster.store.calibration_version() == 1
    with pytest.raises(FencedError):
        cluster.store.keep_learned(cluster.epoch + 1, 1, {"t": b"other"})
    assert cluster.store.calibrations() == {"t": b"state"}
    assert len(cluster.store.peaks(10)) == 1


def test_a_task_that_was_revoked_before_it_came_is_cancelled_at_admission(cluster: Cluster) -> None:
    cluster.store.remember_revoked(["a"])
    assert cluster.admit("a") is AdmitAnswer.REVOKED
    assert cluster.state("a") is State.CANCELLED
    assert [owed.reason.code for owed in cluster.store.owed(10)] == ["revoked"]
