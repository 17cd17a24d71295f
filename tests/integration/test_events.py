"""What Flower learns of brim's services, by the very state that Flower keeps of Celery's events."""

from __future__ import annotations

import threading
from functools import partial

import redis
from celery import Celery

from brim.core.model import Reason, State
from brim.settings import Settings
from brim_services.events import Events
from support.celery_app import configure
from support.waiting import wait_until


def test_a_service_is_a_row_and_a_placed_task_names_its_gpus_queue(valkey_url: str, namespace: str) -> None:
    client = redis.Redis.from_url(valkey_url)
    # given somebody who listens as Flower does, and a task that a producer's event has told of
    app = configure(Celery("flower", set_as_current=False), valkey_url, namespace)
    app.conf.task_send_sent_event = True
    state = app.events.State()
    connection = app.connection_for_read()
    receiver = app.events.Receiver(connection, handlers={"*": state.event})
    listener = threading.Thread(target=partial(receiver.capture, wakeup=False), daemon=True)
    listener.start()
    wait_until(client.pubsub_numpat, what="somebody listens")
    task_id = app.send_task("vision.segment", queue="brim.intake").id
    wait_until(lambda: task_id in state.tasks, what="the task is known")

    # when placement tells of its commit
    settings = Settings.model_validate(
        {"redis": {"url": valkey_url}, "broker": {"global_keyprefix": namespace}, "agent": {"node": "n1"}}
    )
    stop = threading.Event()
    events = Events("placement", settings, stop)
    sent_s = state.tasks[task_id].sent
    events.placed(task_id, "vision.segment", "gpu.n1.0", sent_s + 0.001)
    events.answered("c-1", State.CANCELLED, Reason("cancelled", "cancelled by its owner"))
    events.answered("d-1", State.DEAD, Reason("no_profile", "no profile"))
    thread = threading.Thread(target=events.run)
    thread.start()

    # then it is a row, and the task's page names the queue of the GPU; its state is still "sent"
    wait_until(lambda: state.tasks[task_id].routing_key == "gpu.n1.0", what="the queue is told")
    assert (state.tasks[task_id].state, state.tasks[task_id].sent) == ("PENDING", sent_s + 0.001)
    wait_until(lambda: "d-1" in state.tasks, what="brim's own answers are told")
    assert state.tasks["c-1"].state == "REVOKED"
    assert (state.tasks["d-1"].state, state.tasks["d-1"].exception) == ("FAILURE", "no profile [no_profile]")
    assert state.workers["placement@n1"].alive
    assert state.workers["placement@n1"].sw_ident == "brim"
    stop.set()
    thread.join(10)
    wait_until(lambda: not state.workers["placement@n1"].alive, what="it says that it goes")
    receiver.should_stop = True
    listener.join(10)
    connection.close()
    app.close()
