"""The page in a real browser against `brim up`: what it shows, what it does, and how it comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from support.up import Stack
from support.waiting import wait_until

OUTPUT = Path(__file__).parents[2] / "build" / "ui"
pytestmark = pytest.mark.timeout(180)
CAPTION: dict[str, Any] = {"name": "vision.caption", "args": ["s3://a.png"], "kwargs": {"max_tokens": 128}}


def text(browser: webdriver.Chrome, css: str) -> str:
    """What an element shows; empty if it is not there."""
    found: str | None = browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", css)
    return found or ""


def seen(browser: webdriver.Chrome, css: str, part: str, timeout_s: float = 20.0) -> None:
    """Waits until an element shows a text."""
    wait_until(lambda: part in text(browser, css), what=f"{css} shows {part!r}", timeout_s=timeout_s)


def opened(browser: webdriver.Chrome, stack: Stack, width: int = 1440, height: int = 1000, **features: str) -> None:
    """Opens the page at a size, and waits for its first figures."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    browser.get(stack.addresses["page"])
    seen(browser, "#link", "live")
    seen(browser, "#nodes", "0")


def shot(browser: webdriver.Chrome, name: str) -> None:
    """Keeps a picture."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(OUTPUT / f"{name}.png"))


def widths(browser: webdriver.Chrome) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('.gpu rect')].map((r) => r.className.baseVal + r.getAttribute('width'))"
    )
    return found


def click(browser: webdriver.Chrome, css: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", css)


@pytest.fixture
def busy(stack: Stack) -> Iterator[list[str]]:
    """More captions than the GPUs can hold at once; those that are left are cancelled in the end."""
    with stack.api as api:
        answers = api.post("/v1/tasks:batch", json={"tasks": [CAPTION] * 24}).json()["tasks"]
    ids = [answer["accepted"]["id"] for answer in answers]
    yield ids
    with stack.api as api:
        for task_id in ids:
            api.delete(f"/v1/tasks/{task_id}")


def test_it_shows_what_runs_what_waits_and_why(browser: webdriver.Chrome, stack: Stack, busy: list[str]) -> None:
    opened(browser, stack)

    seen(browser, ".chips", "vision.caption")
    seen(browser, "#lanes", "vision.caption")
    wait_until(lambda: len(text(browser, "#lanes td.reason")) > 10, what="the lane tells why its first task waits")
    seen(browser, "#tasks", "running")
    assert int(text(browser, "#running")) > 0
    assert int(text(browser, "#waiting")) > 0
    before = widths(browser)
    wait_until(lambda: widths(browser) != before, what="a memory report changes a bar")
    shot(browser, "desktop")


def test_it_shows_resident_models_and_what_they_are_doing(browser: webdriver.Chrome, stack: Stack) -> None:
    opened(browser, stack)
    tags = [{"name": "vision.tag", "kwargs": {"text": "a photo"}}] * 400
    with stack.api as api:
        assert len(api.post("/v1/tasks:batch", json={"tasks": tags}).json()["tasks"]) == 400
    wait_until(lambda: "working on " in model_chip(browser), what="it computes a batch", timeout_s=30)
    shot(browser, "models")
    wait_until(lambda: "idle" in model_chip(browser) and text(browser, "#waiting") == "0", what="it has nothing to do")
    assert browser.execute_script("return document.querySelectorAll('.gpu rect.model').length") == 1
    title = str(browser.execute_script("return document.querySelector('.gpu rect.model title').textContent"))
    assert title.startswith("tagger: ")
    assert title.endswith("; idle")
    browser.execute_script("document.querySelector('.gpu:has(rect.model)').click()")
    seen(browser, "#device .models", "tagger")
    seen(browser, "#device .models .doing", "idle")


def model_chip(browser: webdriver.Chrome) -> str:
    found: str = browser.execute_script("return document.querySelector('.gpu:has(rect.model) .chips')?.innerText ?? ''")
    return found


def test_it_is_readable_on_a_phone_and_in_the_dark(browser: webdriver.Chrome, stack: Stack, busy: list[str]) -> None:
    opened(browser, stack, 390, 844)
    seen(browser, ".chips", "vision.caption")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    shot(browser, "phone")

    opened(browser, stack, prefers_color_scheme="dark")
    seen(browser, ".chips", "vision.caption")
    shot(browser, "dark")
    assert poor_contrasts(browser) == []
    opened(browser, stack, prefers_color_scheme="light")
    assert poor_contrasts(browser) == []


def test_a_tasks_story_and_cancelling_it(browser: webdriver.Chrome, stack: Stack, busy: list[str]) -> None:
    opened(browser, stack)
    waits = busy[-1]
    box = browser.find_element(By.ID, "find")
    box.send_keys(waits)
    seen(browser, "#tasks", waits[:8])
    wait_until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#tasks tr")) == 1, what="the filter leaves one")
    click(browser, "#tasks button")
    seen(browser, "#story ol", "admitted")
    seen(browser, "#story dl", waits)
    click(browser, "#story-cancel")
    seen(browser, "#story dl", "cancelled")
    seen(browser, "#tasks", "cancelled")


def test_a_dead_letter_is_tried_again(browser: webdriver.Chrome, stack: Stack) -> None:
    task_id = stack.publish("print(app.send_task('vision.nothing', queue='brim.intake').id)")
    opened(browser, stack)
    seen(browser, "#dead", "no profile")
    seen(browser, "#dead", task_id[:8])

    def told() -> bool:
        if "again" not in text(browser, "#toast"):  # the first try may come before its answer was written
            click(browser, "#dead button:not(.plain)")
            time.sleep(1)
        return "again" in text(browser, "#toast")

    wait_until(told, what="the page says that it is tried again")
    with stack.api as api:
        wait_until(
            lambda: "revived" in [event["event"] for event in api.get(f"/v1/tasks/{task_id}").json()["story"]],
            what="its story tells of the retry",
        )


def test_it_comes_back_when_the_monitor_restarts(browser: webdriver.Chrome, stack: Stack) -> None:
    opened(browser, stack)
    stack.monitor().kill()
    seen(browser, "#link", "not connected")
    seen(browser, "#banner", "does not answer")
    seen(browser, "#link", "live", timeout_s=40)
    wait_until(lambda: text(browser, "#banner") == "", what="the banner goes")
    seen(browser, "#nodes", "0")


def test_everything_is_reached_by_keyboard(browser: webdriver.Chrome, stack: Stack) -> None:
    opened(browser, stack)
    reached = set()
    for _ in range(25):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        found = browser.switch_to.active_element
        reached.add(found.get_attribute("id") or found.get_attribute("class"))
    assert {"theme", "gpu", "find", "state"} <= reached

    browser.find_element(By.CSS_SELECTOR, ".gpu").send_keys(Keys.ENTER)
    seen(browser, "#device-title", "GPU")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not browser.execute_script("return document.getElementById('device').open")


def test_it_asks_nobody_but_the_monitor(browser: webdriver.Chrome, stack: Stack) -> None:
    opened(browser, stack)
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked
    assert all(url.startswith(stack.addresses["page"] + "/") for url in asked)


def test_a_token_opens_it(browser: webdriver.Chrome, stack: Stack) -> None:
    from brim.settings import Settings
    from brim_services.monitor.access import digest
    from integration.test_monitor_api import serving

    os.environ["BRIM_REDIS__URL"] = stack.addresses["redis"]
    try:
        settings = Settings()
    finally:
        del os.environ["BRIM_REDIS__URL"]
    token = {"name": "someone", "sha256": digest("let-me-in"), "scope": "read"}
    settings = Settings.model_validate({**settings.model_dump(), "monitor": {"tokens": [token]}})
    with serving(settings) as url:
        browser.get(url)
        seen(browser, "#login-title", "token")
        browser.find_element(By.ID, "token").send_keys("wrong", Keys.ENTER)
        seen(browser, "#login-error", "not known")
        browser.find_element(By.ID, "token").clear()
        browser.find_element(By.ID, "token").send_keys("let-me-in", Keys.ENTER)
        seen(browser, "#link", "live")
        browser.get("about:blank")
    browser.get_log("browser")  # the refused requests are in it, as they should be


def poor_contrasts(browser: webdriver.Chrome) -> list[str]:
    """Texts whose contrast with their ground is below what WCAG's level AA asks for."""
    found: list[str] = browser.execute_script(CONTRAST)
    return found


CONTRAST = """
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const read = (c) => c.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const colour = read(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const poor = [];
for (const e of document.querySelectorAll("body *")) {
  if (!e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
  if (e.closest("svg")) continue;
  const style = getComputedStyle(e), [a, b] = [light(read(style.color)), light(ground(e))].sort((x, y) => y - x);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
  const ratio = (a + 0.05) / (b + 0.05);
  const name = `${e.tagName}#${e.id}.${e.className}: ${e.textContent.slice(0, 20)}`;
  if (ratio < (large ? 3 : 4.5)) poor.push(`${name} ${ratio.toFixed(2)}`);
}
return poor;
"""
