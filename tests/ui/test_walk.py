"""The documents' own curl commands, run as they stand there against `brim up`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from support.up import Stack
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
USUAL = "http://127.0.0.1:8765"
pytestmark = pytest.mark.timeout(120)


def commands(document: str) -> list[str]:
    """The lines of a document's blocks that call curl, each as one line, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if line.startswith("curl ")]


def run(command: str, stack: Stack, task_id: str = "") -> str:
    """What a command prints; one that would go on for ever is ended when it has printed something."""
    words = [
        word.replace(USUAL, stack.addresses["page"]).replace("$API", stack.addresses["page"]).replace("$ID", task_id)
        for word in shlex.split(command)
    ]
    if "-sN" in words:
        words += ["--max-time", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (28 if "-sN" in words else 0), done
    return done.stdout


def test_the_walk_through_the_api(stack: Stack) -> None:
    assert shutil.which("curl")
    ready, estimate, submit, show, page, cluster, cancel, events = commands("docs/http-api.md")
    assert json.loads(run(ready, stack)) == {"status": "ready"}

    estimated = json.loads(run(estimate, stack))
    assert estimated["vram_mib"] >= sum(part["mib"] for part in estimated["parts"]) > 5000

    accepted = json.loads(run(submit, stack))
    task_id = accepted["id"]
    assert accepted["vram_mib"] > 7000
    again = json.loads(run(submit, stack))
    assert (again["id"], again["repeated"]) == (task_id, True)

    def ended() -> bool:
        return json.loads(run(show, stack, task_id))["state"] == "succeeded"

    wait_until(ended, what="the task has succeeded", timeout_s=60)
    told = json.loads(run(show, stack, task_id))
    assert told["result"] == "a picture from s3://a.png"
    assert [event["event"] for event in told["story"]][:2] == ["admitted", "placed"]
    assert task_id in [task["id"] for task in json.loads(run(page, stack))["tasks"]]
    assert len(json.loads(run(cluster, stack))["gpus"]) == 2
    assert json.loads(run(cancel, stack, task_id))["code"] == "ended"
    first = run(events, stack).splitlines()
    assert first[1] == "event: change"
    assert json.loads(first[2].removeprefix("data: "))["full"] is True


def test_the_readmes_own_request(stack: Stack) -> None:
    [submit] = commands("README.md")
    accepted = json.loads(run(submit, stack))
    assert accepted["state"] in ("waiting", "placed", "claimed", "running")
    assert accepted["vram_mib"] > 7000
