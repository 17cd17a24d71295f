"""Flower beside `brim up`: brim's services as rows, GPU figures, tasks' states and queues, and revoking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver

from support.up import FLOWER_AUTH, Stack
from support.waiting import wait_until

OUTPUT = Path(__file__).parents[2] / "build" / "ui"
LONG: dict[str, Any] = {"name": "vision.caption", "args": ["s3://a.png"], "kwargs": {"max_tokens": 1400}}  # 15 s
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def flower(stack: Stack) -> Iterator[httpx.Client]:
    user, password = FLOWER_AUTH.split(":")
    with httpx.Client(base_url=stack.addresses["flower"], auth=(user, password), timeout=30) as client:
        wait_until(lambda: gpu_workers(client), what="Flower knows the GPUs' workers", timeout_s=60)
        yield client


def gpu_workers(flower: httpx.Client) -> dict[str, Any]:
    """What Flower has been told by the workers of GPUs that it has asked, by their names."""
    found = flower.get("/api/workers", params={"refresh": "1"}).json()
    return {name: told for name, told in found.items() if name.startswith("gpu") and "gpu" in told.get("stats", {})}


def info(flower: httpx.Client, task_id: str) -> dict[str, Any]:
    """What Flower knows of a task; nothing before its first event."""
    answer = flower.get(f"/api/task/info/{task_id}")
    return dict(answer.json()) if answer.status_code == 200 else {}


def state_in_brim(stack: Stack, task_id: str) -> str:
    with stack.api as api:
        return str(api.get(f"/v1/tasks/{task_id}").json()["state"])


def until(flower: httpx.Client, task_id: str, state: str) -> dict[str, Any]:
    wait_until(
        lambda: info(flower, task_id).get("state") == state, what=f"Flower shows {task_id} {state}", timeout_s=60
    )
    return info(flower, task_id)


def test_it_asks_for_the_password(flower: httpx.Client) -> None:
    assert httpx.get(flower.base_url).status_code == 401
    assert httpx.get(flower.base_url, auth=("ann", "guessed")).status_code == 401


def test_intake_and_placement_are_rows_and_workers_show_their_gpu(flower: httpx.Client, stack: Stack) -> None:
    def services() -> dict[str, bool]:
        rows = flower.get("/workers", params={"json": "1"}).json()["data"]
        return {row["hostname"].split("@")[0]: row["status"] for row in rows}

    expected = dict.fromkeys(("intake", "placement", "gpu0", "gpu1", "ordinary"), True)
    wait_until(lambda: services() == expected, what=f"Flower shows {', '.join(expected)}, and nobody else")

    with stack.api as api:
        gpus = {gpu["uuid"]: gpu for gpu in api.get("/v1/cluster").json()["gpus"]}
    shown = {worker["stats"]["gpu"]["uuid"]: worker["stats"]["gpu"] for worker in gpu_workers(flower).values()}
    assert shown.keys() == gpus.keys()
    for uuid, gpu in shown.items():
        assert gpu["total_mib"] == gpus[uuid]["total_mib"] == 24 * 1024
        assert 0 <= gpu["busy"] <= gpu["executors"] == 2


def test_a_tasks_states_are_in_order_and_its_queue_is_the_gpus(flower: httpx.Client, stack: Stack) -> None:
    done, failed = stack.publish(
        "print(tasks.embed.delay('a cat').id, tasks.segment.delay('x', width='a', height='b').id)"
    ).split()

    told = until(flower, done, "SUCCESS")
    times = [told[name] for name in ("sent", "received", "started", "succeeded")]
    assert times == sorted(times)
    assert re.fullmatch(r"gpu\..+\.[01]", told["routing_key"])
    assert told["worker"].startswith("gpu")
    # one that brim gives up itself ends in Flower, too: no worker ever tells of it
    assert "width" in until(flower, failed, "FAILURE")["exception"]


def test_revoking_a_task_that_waits(flower: httpx.Client, stack: Stack) -> None:
    with stack.api as api:
        answers = api.post("/v1/tasks:batch", json={"tasks": [LONG] * 8}).json()["tasks"]
    ids = [answer["accepted"]["id"] for answer in answers]
    try:
        wait_until(lambda: state_in_brim(stack, ids[0]) == "running", what="the first runs", timeout_s=60)
        assert state_in_brim(stack, ids[-1]) == "waiting"

        assert flower.post(f"/api/task/revoke/{ids[-1]}").status_code == 200

        wait_until(lambda: state_in_brim(stack, ids[-1]) == "cancelled", what="the waiting task is cancelled")
        assert until(flower, ids[-1], "REVOKED")["revoked"]
        assert stack.publish(f"print(app.AsyncResult({ids[-1]!r}).state)") == "REVOKED"

        # and one that runs
        assert flower.post(f"/api/task/revoke/{ids[0]}", params={"terminate": "true"}).status_code == 200
        wait_until(lambda: state_in_brim(stack, ids[0]) == "cancelled", what="the running task is ended")
        told = until(flower, ids[0], "REVOKED")
        assert told["received"] <= told["started"] <= told["revoked"]
        assert stack.publish(f"print(app.AsyncResult({ids[0]!r}).state)") == "REVOKED"
    finally:
        with stack.api as api:
            for task_id in ids:
                api.delete(f"/v1/tasks/{task_id}")


def test_it_looks_as_it_should(browser: webdriver.Chrome, flower: httpx.Client, stack: Stack) -> None:
    task_id = stack.publish("print(tasks.embed.delay('a dog').id)")
    until(flower, task_id, "SUCCESS")
    page = stack.addresses["flower"].replace("//", f"//{FLOWER_AUTH}@")
    OUTPUT.mkdir(parents=True, exist_ok=True)

    def shows(path: str, *parts: str) -> None:
        browser.get(page + path)
        wait_until(
            lambda: all(part in browser.find_element("tag name", "body").text for part in parts),
            what=f"{path} shows {parts}",
        )
        browser.save_screenshot(str(OUTPUT / f"flower-{path.split('/')[1]}.png"))

    [name, *_] = gpu_workers(flower)
    shows("/workers", name, "intake@", "placement@")
    shows(f"/task/{task_id}", "vision.embed", "SUCCESS", "gpu.")
    browser.get(f"{page}/worker/{name}")
    assert "total_mib" in browser.page_source
    browser.get("about:blank")
