"""The Celery application, shared by producers and workers."""

import os

from celery import Celery

import brim

url = os.environ.get("VISION_BROKER", "redis://127.0.0.1:6379/0")
app = Celery("vision", broker=url, backend=url, include=["vision.tasks"])
app.conf.update(
    task_default_queue="vision",  # for the tasks that use no GPU: thumbnail and notify
    broker_connection_retry_on_startup=True,
    result_expires=3600,
    task_send_sent_event=True,  # with the next line: what Flower needs to follow each task
    worker_send_task_events=True,
)
brim.install(app)  # the only line that an existing application adds
