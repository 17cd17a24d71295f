"""The words between a node agent and its workers."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery.signals import worker_process_init, worker_ready

from brim.celery.agent_link import Event, Listener, Notice, WorkerIdentity, WorkerSide
from brim.gpu.process import proc_id
from support.waiting import wait_until


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def identity(agent: str = "nobody") -> WorkerIdentity:
    return WorkerIdentity("node-a", "gpu3", "gpu.node-a.3", ("GPU-1",), "b00t", agent)


def test_a_worker_reads_from_its_environment_what_the_agent_wrote() -> None:
    written = identity().variables()

    assert WorkerIdentity.read(written) == identity()
    assert written["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert (identity().hostname, identity().queue) == ("gpu3@node-a", "gpu.node-a.3")


def test_a_process_that_no_agent_started_has_no_identity() -> None:
    assert WorkerIdentity.read({"BRIM_NODE": "node-a"}) is None


def test_the_agent_hears_greetings_and_changes_in_order(listener: Listener) -> None:
    worker = WorkerSide(identity(listener.address))
    worker.attach()
    try:
        worker_ready.send(sender=None)
        worker_process_init.send(sender=None)
        worker.changed()
        worker.changed("1-2")
    finally:
        worker_ready.disconnect(dispatch_uid="brim.agent_link.ready")
        worker_process_init.disconnect(dispatch_uid="brim.agent_link.executor")

    heard = [Notice(event, "b00t", proc_id() or "") for event in Event]
    assert listener.receive() == [*heard, Notice(Event.CHANGED, "b00t", proc_id() or "", over="1-2")]
    assert listener.receive() == []


def test_a_notice_is_dropped_when_the_agent_is_gone_or_too_busy(listener: Listener) -> None:
    WorkerSide(identity("gone")).changed()
    worker = WorkerSide(identity(listener.address))

    for _ in range(2000):  # more than the socket holds
        worker.changed()

    assert listener.receive()[0].event == Event.CHANGED


def test_an_end_waits_for_room(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.celery.agent_link.OVER_TIMEOUT_S", 30.0)
    worker = WorkerSide(identity(listener.address))
    for _ in range(2000):  # more than the socket holds
        worker.changed()

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(worker.changed, "1-2")
        heard = wait_until(lambda: [n for n in listener.receive() if n.over], what="the end is heard")
        told.result()

    assert [notice.over for notice in heard] == ["1-2"]


def test_noise_is_left_out(listener: Listener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for noise in (b"", b"\xff\xfe", b"dance b p", b"ready"):
            stranger.sendto(noise, f"\0{listener.address}")

    assert listener.receive() == []
