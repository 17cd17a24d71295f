"""What stories tell against the invariants, by stories short enough to judge by eye."""

from __future__ import annotations

import pytest

from brim.core.model import Device
from brim_services.invariants import overcommitted, story_breaches

GPU = Device("GPU-0", "node", 0, "SIM", 1000, 100, 0, 0, 4, 0)


def story(*events: str) -> list[dict[str, object]]:
    """Events as "name" or "name attempt", one ms apart; every placement takes 500 MiB of GPU-0."""
    lines: list[dict[str, object]] = []
    for t, (event, *attempt) in enumerate(text.split() for text in events):
        line: dict[str, object] = {"t": t, "event": event}
        if attempt:
            line["attempt"] = attempt[0]
        if event == "placed":
            line |= {"devices": "GPU-0", "vram_mib": 500}
        lines.append(line)
    return lines


@pytest.mark.parametrize(
    "events",
    [
        ("admitted", "placed a", "claimed a", "started a", "finishing a", "succeeded a"),
        ("admitted", "placed a", "lost a", "placed b", "handed_over b", "admitted", "placed c", "failed c"),
        ("refused", "answered", "revived", "placed a", "lost a", "dead", "answered"),
        ("admitted", "placed a", "cancelled"),
        ("admitted", "expired"),
    ],
)
def test_stories_in_order(events: tuple[str, ...]) -> None:
    assert list(story_breaches(story(*events))) == []


@pytest.mark.parametrize(
    ("events", "breach"),
    [
        (("admitted", "placed a", "succeeded a", "failed a"), "no loss: ended twice, the second time failed"),
        (("admitted", "placed a", "placed b"), "one live attempt: b was placed while a lived"),
        (("admitted", "placed a", "admitted"), "one live attempt: a new run began while attempt a lived"),
        (("admitted", "placed b", "failed a"), "released once: failed by attempt a while the live one was b"),
    ],
)
def test_stories_out_of_order(events: tuple[str, ...], breach: str) -> None:
    assert breach in list(story_breaches(story(*events)))


def test_reservations_that_overlap_must_fit_the_device() -> None:
    whole = story("admitted", "placed a", "succeeded a")
    later = [{**line, "t": line["t"] + 1} for line in whole]  # type: ignore[operator]
    between = [{**line, "t": line["t"] + 0.5} for line in whole]  # type: ignore[operator]

    assert list(overcommitted([whole, later], [GPU])) == []
    assert list(overcommitted([whole, between], [GPU])) == [
        "no over-commit: 1000 MiB were reserved at once on node.0, which has 900"
    ]


def test_a_model_executor_holds_memory_from_when_it_is_wanted_until_it_is_gone() -> None:
    whole = story("admitted", "placed a", "succeeded a")
    began, ended = whole[0]["t"], whole[-1]["t"]
    life = [
        {"t": began, "executor": "m", "event": "wanted", "device": GPU.uuid, "vram_mib": 500},
        {"t": ended, "executor": "m", "event": "gone"},
    ]
    assert list(overcommitted([], [GPU], life)) == []
    assert len(list(overcommitted([whole], [GPU], life))) == 1
    later = [{**line, "t": line["t"] + 99} for line in whole]  # type: ignore[operator]
    assert list(overcommitted([later], [GPU], life)) == []
    assert len(list(overcommitted([later], [GPU], life[:1]))) == 1
