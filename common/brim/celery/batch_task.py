"""`brim.BatchTask`: a task whose function is given many calls at once.

Producers call it like any other task, and every call is a task of its own: one id, one result, one state. Profiles
with ``batch`` have it run in model executors (docs/batching.md); anywhere else the function gets one item at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from celery import Task

from brim.core.attributes import TaskSignature
from brim.core.batching import Failed, WrongResultCount

from .envelope import ASKED, HEADER


@dataclass(slots=True)
class Item:
    """One call of a batched task. ``staged`` is what the task's ``stage`` made of it, None without that."""

    id: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments by name, and what its producer passed in the ``brim`` header."""
    staged: Any = None


@dataclass(frozen=True, slots=True)
class Computed:
    """A result, told apart from there being none."""

    value: Any


_answers: ContextVar[Computed | Failed | None] = ContextVar("brim_batch_answer", default=None)


class BatchTask(Task):
    """Base of batched tasks: ``@app.task(base=brim.BatchTask)`` on a function of a list of `Item`.

    The function returns one result for each item, in order, ``brim.Failed(exc)`` in place of one that failed. Where
    it raises, the batch is tried again in halves until only the items that are to blame fail.
    """

    abstract = True
    typing = False
    """The function's own parameter is the list of items, not what producers pass."""

    load: Callable[[], Any] | None = None
    """Called once in every process that runs the task, before its first item; its result is kept as ``loaded``."""
    stage: Callable[[Item], Any] | None = None
    """Prepares one item on the host, beside the batch that is computed; its result is the item's ``staged``."""
    call: Callable[..., Any] | None = None
    """A function with the parameters that producers pass, where formulas name positional ones. It is never called."""
    loaded: Any = None

    _loading = threading.Lock()
    _is_loaded = False

    def __init_subclass__(cls, **options: Any) -> None:
        """The user's function, which is Celery's ``run``, becomes `compute`: ``run`` is for one call, as ever."""
        super().__init_subclass__(**options)
        if "run" in cls.__dict__:
            cls.compute = cls.__dict__["run"]  # type: ignore[method-assign]
            del cls.run

    def compute(self, items: Sequence[Item]) -> Sequence[Any]:
        """The user's function."""
        raise NotImplementedError(f"{self.name} has no function")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One call: a batch of one, or what has become of it in the batch that it was computed in."""
        answer = _answers.get() or self._alone(args, kwargs)
        if isinstance(answer, Failed):
            raise answer.error
        return answer.value

    def _alone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Computed | Failed:
        self.ensure_loaded()
        item = self.item(self.request.id or "", args, kwargs, self.request.headers)
        if self.stage is not None:
            item.staged = self.stage(item)
        results = self.compute([item])
        if len(results) != 1:
            raise WrongResultCount(f"{self.name} returned {len(results)} results for one item")
        return results[0] if isinstance(results[0], Failed) else Computed(results[0])

    def ensure_loaded(self) -> None:
        """Load the model, once in this process."""
        with self._loading:
            if not self._is_loaded and self.load is not None:
                self.loaded = self.load()
            self._is_loaded = True

    def item(
        self, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any] | None
    ) -> Item:
        """An item from a message's arguments and headers."""
        header = (headers or {}).get(HEADER) or {}
        asked = header.get(ASKED, header).get("attributes") or {}
        return Item(task_id, args, kwargs, {**self.parameters().bind(str(self.name), args, kwargs), **asked})

    def parameters(self) -> TaskSignature:
        """What producers may pass: the parameters of ``call``, or anything."""
        return TaskSignature.from_callable(self.call) if self.call is not None else _ANYTHING


@contextmanager
def answering(answer: Computed | Failed) -> Iterator[None]:
    """Within this, a batched task's ``run`` answers for the item that was computed, instead of computing."""
    token = _answers.set(answer)
    try:
        yield
    finally:
        _answers.reset(token)


def _anything(*args: Any, **kwargs: Any) -> None:
    """Stands for the parameters of a batched task that does not say what producers pass."""


_ANYTHING = TaskSignature.from_callable(_anything)
