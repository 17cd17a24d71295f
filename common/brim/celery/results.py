"""Results of a batch in one round trip, where Celery's result backend is Redis.

Celery stores a result in two: it looks whether a successful one is there already, and writes. Within `Results.together`
what is there is read for all tasks at once, and what Celery writes is kept until the end and sent at once. Whatever
else it does with the backend, and every other backend, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend

Patiently = Callable[[Callable[[], Any]], Any]
"""Calls a function until its server answers."""


class Gathered:
    """What has been read and is to be written, by key."""

    def __init__(self, known: dict[Any, Any]) -> None:
        self.known = known
        self.writes: list[tuple[Any, Any, int | None]] = []


_gathered: ContextVar[Gathered | None] = ContextVar("brim_results", default=None)


class _Gathering(RedisBackend):
    """Mixed into the app's backend; it changes nothing outside `Results.together`."""

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
            gathered.writes.append((key, value, expires))
        else:
            super()._set(key, value, expires)

    def write(self, gathered: Gathered) -> None:
        """Store and announce results in one round trip, as `RedisBackend._set` does one by one."""
        with self.client.pipeline(transaction=False) as pipe:
            for key, value, own_expires in gathered.writes:
                expires = self.expires if own_expires is None else own_expires
                if expires:
                    pipe.setex(key, expires, value)
                else:
                    pipe.set(key, value)
                pipe.publish(key, value)
            pipe.execute()


class Results:
    """The result backend of an app, in a process that answers for many tasks at once."""

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
        gathered = Gathered(dict(zip(keys, patiently(lambda: backend.mget(keys)), strict=True)))
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

    def _backend(self) -> Any:
        """This thread's backend (Celery has one for each) if it is Redis, able to gather."""
        backend = self._app.backend
        if isinstance(backend, RedisBackend) and not isinstance(backend, _Gathering):
            kind = type(backend)
            backend.__class__ = type(kind.__name__, (_Gathering, kind), {"__module__": kind.__module__})
        return backend if isinstance(backend, _Gathering) else None
