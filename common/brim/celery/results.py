"""Results in fewer round trips, where Celery's result backend is Redis.

Celery stores a result in two: it looks whether a successful one is there already, and writes. Within `Results.together`
what is there is read for all tasks at once, and what Celery writes is kept until the end and sent at once; within
`Results.kept` the result of one task is kept, for whoever stores it with the task's end. Whatever else Celery does with
the backend, and every other backend, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.states import SUCCESS

from brim.store.types import StoredResult

LONG = 2**20
"""A result that is longer is stored by itself: sending it may take the time that the backend allows, not brim's."""

Patiently = Callable[[Callable[[], Any]], Any]
"""Calls a function until its server answers."""


class Gathered:
    """What has been read, by key, and is to be written."""

    def __init__(self, known: dict[Any, Any]) -> None:
        self.known = known
        self.writes: list[StoredResult] = []


_gathered: ContextVar[Gathered | None] = ContextVar("brim_results", default=None)


class _Gathering(RedisBackend):
    """Mixed into the app's backend, below what that does by itself to a result before it stores and after it reads it.

    It changes nothing outside `Results.together` and `Results.kept`.
    """

    def get(self, key: Any) -> Any:
        """What was read for all, or written meanwhile."""
        gathered = _gathered.get()
        if gathered is not None and key in gathered.known:
            return gathered.known[key]
        return super().get(key)

    def _set(self, key: Any, value: Any, expires: int | None = None) -> None:
        gathered = _gathered.get()
        if gathered is not None and key in gathered.known:
            gathered.known[key] = value
            gathered.writes.append(StoredResult(key, value, (self.expires if expires is None else expires) or 0))
        else:
            super()._set(key, value, expires)

    def read(self, keys: Sequence[Any]) -> Any:
        """What is stored, as it is stored."""
        return RedisBackend.mget(self, keys)

    def write(self, gathered: Gathered) -> None:
        """Store and announce results in one round trip, as `RedisBackend._set` does one by one."""
        with self.client.pipeline(transaction=False) as pipe:
            for result in gathered.writes:
                if result.expires_s:
                    pipe.setex(result.key, result.expires_s, result.value)
                else:
                    pipe.set(result.key, result.value)
                pipe.publish(result.key, result.value)
            pipe.execute()


class Kept:
    """A task's result, which from `begin` on is not stored, but kept for who stores it with the task's end."""

    def __init__(self, backend: Any, gathered: Gathered, task_id: str) -> None:
        self._backend = backend
        self._gathered = gathered
        self._task_id = task_id
        self._apart = False

    def begin(self) -> None:
        """What is stored for the task from now on is kept; Celery is told that there is nothing yet."""
        self._gathered.known[self._backend.get_key_for_task(self._task_id)] = None

    @property
    def result(self) -> StoredResult | None:
        """What is to be stored; None if nothing is, as for a task that ignores its result."""
        return self._gathered.writes[-1] if self._gathered.writes else None

    @property
    def apart(self) -> bool:
        """Whether it is to be stored by itself, between a claim of its own and the end."""
        return self._apart or (self.result is not None and len(self.result.value) > LONG)

    def set_apart(self) -> None:
        """Have it stored by itself."""
        self._apart = True

    @property
    def is_success(self) -> bool:
        """Whether what is to be stored is what the function has returned, which nothing replaces."""
        token = _gathered.set(self._gathered)
        try:
            return bool(self._backend.get_task_meta(self._task_id, cache=False)["status"] == SUCCESS)
        finally:
            _gathered.reset(token)

    def store(self) -> None:
        """Store it as Celery would have: unless there is a successful result already."""
        if self.result is not None and self._backend.get_state(self._task_id) != SUCCESS:
            written = self.result.key, self.result.value, self.result.expires_s
            self._backend.ensure(self._backend._set, written)


class Results:
    """The result backend of an app, in a process that answers for its tasks."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    @contextmanager
    def together(self, task_ids: Sequence[str], patiently: Patiently) -> Iterator[None]:
        """Within this, results of these tasks are gathered, and stored when it ends."""
        backend = self._backend()
        if backend is None or not task_ids:
            yield
            return
        keys = [backend.get_key_for_task(task_id) for task_id in task_ids]
        gathered = Gathered(dict(zip(keys, patiently(lambda: backend.read(keys)), strict=True)))
        token = _gathered.set(gathered)
        try:
            yield
        finally:
            _gathered.reset(token)
            if gathered.writes:
                patiently(lambda: backend.write(gathered))

    @contextmanager
    def apart(self, is_apart: bool) -> Iterator[None]:
        """Within this, if it is so, a result is stored at once all the same."""
        token = _gathered.set(None) if is_apart else None
        try:
            yield
        finally:
            if token is not None:
                _gathered.reset(token)

    @contextmanager
    def kept(self, task_id: str, client: redis.Redis) -> Iterator[Kept | None]:
        """Within this, the task's result may be kept; None unless the backend is Redis, where this client is, too."""
        backend = self._backend()
        if backend is None or not _is_at(backend, client):
            yield None
            return
        gathered = Gathered({})
        token = _gathered.set(gathered)
        try:
            yield Kept(backend, gathered, task_id)
        finally:
            _gathered.reset(token)

    def _backend(self) -> Any:
        """This thread's backend (Celery has one for each) if it is Redis, able to gather."""
        backend = self._app.backend
        if isinstance(backend, RedisBackend) and not isinstance(backend, _Gathering):
            kind = type(backend)
            bases = (_Gathering,) if kind is RedisBackend else (kind, _Gathering)
            backend.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
        return backend if isinstance(backend, _Gathering) else None


def _is_at(backend: Any, client: redis.Redis) -> bool:
    """Whether a backend stores in the very database that a client works in, and as the same user."""
    there, here = backend.connparams, client.connection_pool.connection_kwargs
    if not (there.get("host") or there.get("path")):  # a Sentinel's backend says so elsewhere
        return False
    defaults = {"port": 6379, "db": 0}
    return all(
        (there.get(name) or defaults.get(name)) == (here.get(name) or defaults.get(name))
        for name in ("host", "port", "path", "db", "username", "password")
    )
