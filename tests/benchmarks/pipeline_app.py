"""The app of bench_pipeline: tasks that do nothing or sleep, and tell when and where they ran."""

import os
import time

from celery import Celery

import brim

app = Celery("bench", broker=os.environ["BENCH_BROKER"], backend=os.environ["BENCH_BROKER"])
app.conf.broker_transport_options = {"global_keyprefix": os.environ["BENCH_PREFIX"]}
app.conf.result_backend_transport_options = {"global_keyprefix": os.environ["BENCH_PREFIX"]}
if os.environ["BENCH_PREFIX"] == "brim.":
    brim.install(app)


@app.task(name="bench.work")
def work(seconds: float) -> tuple[int, float, float]:
    """Sleeps; returns its process id and when it started and ended."""
    start = time.time()
    if seconds:
        time.sleep(seconds)
    return os.getpid(), start, time.time()
