"""A running stack and a real browser, once for all tests of the page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from support.up import FLOWER_AUTH, Stack

ROOT = Path(__file__).parents[2]
QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("up")
    path = [str(ROOT / part) for part in ("common", "services", "examples/vision")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "BRIM_DEVICES": "sim:2x24GiB",
        "BRIM_AGENT__EXECUTORS_PER_GPU": "2",
        "BRIM_FLOWER__BASIC_AUTH": FLOWER_AUTH,
        "BRIM_SECURITY__HEADER_KEY": "signed, so that all of it is seen to work with signed messages",
    }
    argv = [sys.executable, "-m", "brim_services.cli", "up", "--folder", str(folder), "--json"]
    argv += [part for name in ("redis", "flower", "monitor") for part in (f"--{name}-port", "0")]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        line = process.stdout.readline()
        assert line, "brim up did not start"
        addresses = json.loads(line)
        environment |= {"BRIM_REDIS__URL": addresses["redis"], "VISION_BROKER": addresses["redis"]}
        yield Stack(process, addresses, environment)
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """Debian's Chromium; after the test its console must be free of errors."""
    options = webdriver.ChromeOptions()
    for argument in (*QUIET, f"--user-data-dir={tmp_path / 'chromium'}"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    errors = [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    driver.quit()
    assert [entry for entry in errors if "net::ERR_" not in entry["message"]] == []
