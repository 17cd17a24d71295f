"""The live feed: one reader of Redis for any number of watchers.

Every device, node and lane carries the revision at which it last changed, so a watcher needs no queue: it is
sent what has changed since the revision it has. A slow one simply gets more at once, later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from redis import RedisError

from brim.settings import Settings
from brim.store import Store
from brim.store.live import Ending
from brim_services.picture import Gpu, Painter, Picture, Server, WaitingLane

from .history import History

log = logging.getLogger("brim.monitor")

WATCHED_S = 0.5
"""Between two looks while someone watches; longer where a look takes more than a quarter of it."""
UNWATCHED_S = 5.0
"""Between two looks otherwise: history goes on."""
HEARTBEAT_S = 10.0
"""A watcher hears something at least this often."""

STREAM_S = 3600.0
"""A stream ends after this, and its reader comes back where it left off: a token that was withdrawn lasts no longer."""
MOST_GONE = 1000
"""How many names that are gone are remembered."""

T = TypeVar("T", Gpu, Server, WaitingLane)


class Revisions(Generic[T]):
    """Named values as JSON text, each with the revision at which it changed; and when others went."""

    def __init__(self, kind: type[T]) -> None:
        self.complete_after = 0
        """From a revision before this one nobody can be brought up to date by changes alone."""
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._values: dict[str, T] = {}
        self._texts: dict[str, tuple[int, str]] = {}
        self._gone: dict[str, int] = {}

    def update(self, values: Mapping[str, T], revision: int) -> None:
        """Takes over the values of a revision."""
        changed = {name: value for name, value in values.items() if self._values.get(name) != value}
        gone = self._values.keys() - values.keys()
        for name, value in changed.items():
            self._texts[name] = (revision, self._adapter.dump_json(value).decode())
            self._gone.pop(name, None)
        for name in gone:
            del self._texts[name]
            self._gone[name] = revision
        while len(self._gone) > MOST_GONE:
            self.complete_after = self._gone.pop(next(iter(self._gone)))
        self._values = dict(values)

    def since(self, revision: int) -> tuple[list[str], list[str]]:
        """JSON texts of what has changed after a revision, and names that are gone."""
        texts = [text for changed, text in self._texts.values() if changed > revision]
        return texts, [name for name, changed in self._gone.items() if changed > revision]


@dataclass(slots=True)
class Board:
    """What watchers are told, guarded by the feed's lock."""

    revision: int = 0
    gpus: Revisions[Gpu] = field(default_factory=lambda: Revisions(Gpu))
    nodes: Revisions[Server] = field(default_factory=lambda: Revisions(Server))
    lanes: Revisions[WaitingLane] = field(default_factory=lambda: Revisions(WaitingLane))
    picture: Picture | None = None
    summary: str = ""
    """The rest of an event, as JSON fields."""
    away: str | None = None
    """Why Redis cannot be read at the moment."""


class Feed:
    """Reads pictures in a thread of its own and tells watchers on the event loop."""

    def __init__(self, store: Store, settings: Settings, observe: Callable[[Picture, Sequence[Ending]], None]) -> None:
        self.boot = uuid.uuid4().hex[:8]
        self.history = History(store)
        self._painter = Painter(store, settings)
        self._observe = observe
        self._board = Board()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._watchers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ends reading, and every watcher's stream."""
        self._stop.set()
        self._wake.set()
        self._tell()

    @property
    def picture(self) -> Picture | None:
        """The latest picture; None before the first."""
        return self._board.picture

    @property
    def away(self) -> str | None:
        """Why Redis cannot be read at the moment; None if it can."""
        return self._board.away

    @property
    def watchers(self) -> int:
        """How many streams are open."""
        return len(self._watchers)

    def look(self) -> Picture:
        """The cluster now. Raises what Redis raises."""
        return self._painter.paint()

    async def follow(self, last: str | None) -> AsyncGenerator[str]:
        """Server-sent events from the one after ``last`` (an event's id), until the feed stops or for `STREAM_S`."""
        with self._watching() as changed:
            revision = self._resume(last)
            until_s = time.monotonic() + STREAM_S
            while not self._stop.is_set() and time.monotonic() < until_s:
                text, revision = self._event(revision)
                yield text
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT_S)
                except TimeoutError:
                    continue
                changed.clear()

    # -- telling ---------------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self) -> Any:
        changed = asyncio.Event()
        self._watchers[changed] = asyncio.get_running_loop()
        self._wake.set()
        try:
            yield changed
        finally:
            del self._watchers[changed]

    def _resume(self, last: str | None) -> int:
        boot, _, revision = (last or "").partition("-")
        return int(revision) if boot == self.boot and revision.isdecimal() else 0

    def _event(self, revision: int) -> tuple[str, int]:
        """One event with everything after ``revision``, and the revision that it leads to."""
        with self._lock:
            board = self._board
            kinds: dict[str, Revisions[Any]] = {"gpus": board.gpus, "nodes": board.nodes, "lanes": board.lanes}
            if any(revision < kind.complete_after for kind in kinds.values()):
                revision = 0
            parts = {"full": json.dumps(revision == 0), "away": json.dumps(board.away)}
            if board.picture is not None:
                for name, kind in kinds.items():
                    texts, gone = kind.since(revision)
                    parts[name] = f"[{','.join(texts)}]"
                    parts[f"{name}_gone"] = json.dumps(gone)
            fields = [f'"{name}":{text}' for name, text in parts.items()]
            data = ",".join([*fields, board.summary] if board.summary else fields)
            return f"id: {self.boot}-{board.revision}\nevent: change\ndata: {{{data}}}\n\n", board.revision

    def _tell(self) -> None:
        for changed, loop in list(self._watchers.items()):
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:
                continue  # its loop is closed: the server is going down

    # -- reading ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            self._read()
            took_s = time.monotonic() - began_s
            pause_s = max(WATCHED_S, 4 * took_s) - took_s
            self._wake.clear()
            if self._watchers:
                self._stop.wait(pause_s)
            elif not self._wake.wait(UNWATCHED_S):
                continue

    def _read(self) -> None:
        board = self._board
        try:
            picture = self._painter.paint()
            self.history.extend(picture.at_s)
            self._observe(picture, self.history.fresh)
        except RedisError as error:
            if board.away is None:
                log.warning("Redis is away: %s", error)
            with self._lock:
                board.away = str(error)
        else:
            summary = _summary(picture, self.history)
            with self._lock:
                revision = board.revision + 1
                board.gpus.update(picture.gpus, revision)
                board.nodes.update(picture.nodes, revision)
                board.lanes.update(picture.lanes, revision)
                board.picture, board.away, board.revision = picture, None, revision
                board.summary = summary
        self._tell()


def _summary(picture: Picture, history: History) -> str:
    fields = {
        "at_s": picture.at_s,
        "counts": picture.counts,
        "intake_backlog": picture.intake_backlog,
        "problems": picture.problems,
        "history": history.series(picture.at_s),
    }
    return json.dumps(fields)[1:-1]
