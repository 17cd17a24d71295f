"""How a service runs: step after step until it is told to stop, through outages of Redis."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_when_event_set, wait_exponential_jitter
from tenacity.nap import sleep_using_event

from brim.settings import Settings
from brim.store import Store
from brim.store.connection import address, check_server, is_outage

log = logging.getLogger("brim")

BEAT_S = 1.0
"""A health check may look at the file's age; nothing is gained by touching it more often."""


class Service(Protocol):
    """One step at a time; a step that met an outage of Redis is simply taken again."""

    def step(self) -> None:
        """Does what is there to do, or waits for it for at most about a second."""

    def lost_touch(self) -> None:
        """Redis was away: what was mirrored may be stale."""


class Pulse:
    """Touches a file while things go well, for health checks: its age says when that was last so."""

    def __init__(self, file: str) -> None:
        self._file = Path(file) if file else None
        self._beaten_s = -math.inf

    def beat(self) -> None:
        """It goes well at this moment."""
        if self._file is not None and time.monotonic() - self._beaten_s >= BEAT_S:
            self._file.touch()
            self._beaten_s = time.monotonic()


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


_told_away = threading.Event()
"""Whether the log says that Redis is away."""


def patience(
    url: str, stop: threading.Event, lost_touch: Callable[[], None] = lambda: None
) -> Callable[[Callable[[], None]], None]:
    """Calls what it is given, again and again with growing pauses while Redis is away, until it succeeds or ``stop``.

    One log line says that Redis is away, one that it is back, however many threads notice.
    """

    def away(state: RetryCallState) -> None:
        if state.outcome is not None and not _told_away.is_set():
            _told_away.set()
            log.warning("Redis at %s is away: %s; trying again", address(url), state.outcome.exception())
        lost_touch()

    attempts = Retrying(
        retry=retry_if_exception(is_outage),
        wait=wait_exponential_jitter(multiplier=0.1, max=2.0, jitter=0.2),
        stop=stop_when_event_set(stop),
        sleep=sleep_using_event(stop),
        before_sleep=away,
        reraise=True,
    )

    def patient(action: Callable[[], None]) -> None:
        try:
            attempts(action)
        except Exception as error:
            if not (stop.is_set() and is_outage(error)):
                raise
            return
        if _told_away.is_set() and attempts.statistics["attempt_number"] > 1:
            _told_away.clear()
            log.warning("Redis at %s is back", address(url))

    return patient


def patiently(action: Callable[[], None], url: str, stop: threading.Event) -> None:
    """Calls ``action`` with `patience`."""
    patience(url, stop)(action)


def serve(service: Service, settings: Settings, stop: threading.Event) -> None:
    """Steps until ``stop``, through outages, and never spins; a health check sees whether steps succeed."""
    pulse = Pulse(settings.health.file)
    patient = patience(settings.redis.url, stop, service.lost_touch)
    while not stop.is_set():
        patient(service.step)
        pulse.beat()


def open_store(settings: Settings, stop: threading.Event, *, single: bool = False) -> Store:
    """A store on a server that answers and can be brim's; waits for the server until ``stop``.

    ``single``: for who calls from one thread, see `connect`. Raises `ServerRefused`.
    """
    store = Store.of(settings)

    def meet() -> None:
        nonlocal store
        check_server(store.client)
        if single:
            store = Store.of(settings, single=True)

    patiently(meet, settings.redis.url, stop)
    return store
