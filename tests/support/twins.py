"""The same app twice, with and without brim, each with its workers; what a producer sees of the two is compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.result import AsyncResult, GroupResult, ResultBase

from brim.store import Store
from support.apps.compat import RESULTS_ENV, TABLE, VARIANT_ENV, WITH_BRIM_ENV, Variant, build
from support.celery_app import BROKER_ENV, NAMESPACE_ENV, worker
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
APP = "support.apps.compat"
PATIENCE_S = 60.0


@dataclass
class Side:
    """One of the twins, as its producer has it."""

    app: Celery
    client: redis.Redis
    namespace: str
    with_brim: bool

    def task(self, name: str) -> Any:
        """A task of the app; ``compat.`` may be left out."""
        return self.app.tasks.get(f"compat.{name}") or self.app.tasks[name]

    def s(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A signature."""
        return self.task(name).s(*args, **kwargs)

    def si(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A signature that takes no result of another task."""
        return self.task(name).si(*args, **kwargs)

    def notes(self, task_id: str, count: int) -> list[str]:
        """What a task has noted, once it is as much as that."""
        key = f"{self.namespace}notes:{task_id}"
        wait_until(lambda: self.client.llen(key) >= count, what=f"{count} notes of {key}", timeout_s=PATIENCE_S)
        return [line.decode() for line in self.client.lrange(key, 0, -1)]

    def gate(self) -> str:
        """A key that tasks can wait for."""
        return f"{self.namespace}gate:{uuid.uuid4().hex}"

    def open(self, gate: str) -> None:
        """Let those tasks go on."""
        self.client.set(gate, 1, ex=300)


def seen(result: ResultBase, timeout_s: float = PATIENCE_S) -> Any:
    """What a producer sees of a result: its state, its value or its exception, and the same of its children."""
    if isinstance(result, GroupResult):
        return [seen(one, timeout_s) for one in result.results]
    if not isinstance(result, AsyncResult):
        return "a result that this backend does not read back"
    try:
        value = result.get(timeout=timeout_s)
    except TimeoutError:
        raise
    except Exception as error:
        traceback = str(result.traceback or "")
        value = [type(error).__name__, str(error), "Traceback" in traceback]
    children = sorted(json.dumps(seen(child, timeout_s), default=repr) for child in result.children or [])
    return {"state": result.state, "value": value, "name": result.name, "children": children}


def forget_ids(value: Any) -> Any:
    """The same with every uuid replaced, for comparing two runs."""
    text = json.dumps(value, default=repr, sort_keys=True)
    return json.loads(re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<id>", text))


@dataclass
class Twins:
    """Both sides, and brim's store."""

    without: Side
    with_: Side
    store: Store

    def compare(self, case: Callable[[Side], Any]) -> Any:
        """What the case sees, which must be the same on both sides."""
        expected, got = forget_ids(case(self.without)), forget_ids(case(self.with_))
        assert got == expected, f"without brim {expected}\nwith brim    {got}"
        return got


@contextmanager
def twins(url: str, folder: Path, variant: Variant = Variant.REDIS) -> Iterator[Twins]:
    """Both apps with their workers, and brim's services for one of them."""
    token = uuid.uuid4().hex[:8]
    with ExitStack() as stack:
        client = stack.enter_context(redis.Redis.from_url(url))
        sides = []
        for with_brim in (False, True):
            namespace = f"t{token}{'b' if with_brim else 'a'}:"
            results = results_of(variant, url, folder / namespace[:-1])
            app = build(url, namespace, variant, results, with_brim=with_brim)
            stack.callback(app.close)
            sides.append(Side(app, client, namespace, with_brim))
            environment = {
                WITH_BRIM_ENV: "yes" if with_brim else "no",
                NAMESPACE_ENV: namespace,
                RESULTS_ENV: results,
                VARIANT_ENV: variant,
            }
            if with_brim:
                layout = {} if variant is Variant.DJANGO else LAYOUT
                stack.enter_context(_brim(url, folder, {**environment, **layout}))
            stack.enter_context(
                worker(
                    APP,
                    ["compat", "elsewhere"],
                    url=url,
                    namespace=namespace,
                    log_path=folder / f"{'with' if with_brim else 'without'}.log",
                    options=[f"--concurrency={1 if with_brim else 2}"],
                    env=environment,
                )
            )
        store = Store(client, f"{namespace}brim:")
        wait_until(
            lambda: any(device.state == "up" for device in store.devices()), what="the device is up", timeout_s=120
        )
        wait_until(store.profile_names, what="profiles are published", timeout_s=60)
        yield Twins(*sides, store)
        assert store.audit() == []


def results_of(variant: Variant, url: str, place: Path) -> str:
    """Address of a side's result backend; ``place`` is that side's own."""
    place.mkdir()
    return {
        Variant.REDIS: url,
        Variant.DJANGO: f"file://{place}",
        Variant.DATABASE: f"db+sqlite:///{place}/results.sqlite",
        Variant.RPC: "rpc://",
    }[variant]


LAYOUT = {"BRIM_BROKER__SEP": ":", "BRIM_BROKER__PRIORITY_STEPS": "[0, 5, 9]"}


@contextmanager
def _brim(url: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Intake, placement and an agent with one simulated device of two executors, as processes."""
    table = folder / "table.yaml"
    table.write_text(TABLE)
    prefix = {"global_keyprefix": environment[NAMESPACE_ENV]}
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("common", "services", "tests")),
        BROKER_ENV: url,
        **environment,
        "BRIM_REDIS__URL": url,
        "BRIM_BROKER__GLOBAL_KEYPREFIX": environment[NAMESPACE_ENV],
        "BRIM_RESULTS__BACKEND": environment[RESULTS_ENV],
        "BRIM_RESULTS__APP_OPTIONS": json.dumps({"result_backend_transport_options": prefix, "result_extended": True}),
        "BRIM_RESOURCES__TABLE": str(table),
        "BRIM_PLACEMENT__POLICY_FILE": str(ROOT / "configs" / "placement.yaml"),
        "BRIM_DEVICES": "sim:1x24GiB",
        "BRIM_SIM_DIR": str(folder / "devices"),
        "BRIM_AGENT__NODE": "twin",
        "BRIM_AGENT__EXECUTORS_PER_GPU": "2",
        "BRIM_AGENT__LOG_FOLDER": str(folder / "logs"),
    }
    running = []
    try:
        for words in (["intake"], ["placement"], ["worker", "-A", APP]):
            with (folder / f"{words[0]}.log").open("wb") as log:
                command = [sys.executable, "-m", "brim_services.cli", *words]
                running.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT))
        yield
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
