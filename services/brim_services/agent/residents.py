"""The model executors of a node: placement wants them, the agent runs them, and puts their items back when they end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from brim.celery.agent_link import EXECUTOR
from brim.celery.envelope import BrokerLayout
from brim.core.batching import Phase
from brim.core.model import AttemptView, Reason
from brim.core.oversight import DRAINING
from brim.core.posts import Post, Worker
from brim.settings import Settings
from brim.store import Store
from brim.store.types import ExecutorView

log = logging.getLogger("brim.agent")

POOL = "threads"
"""A model executor computes in its worker's own process: what is staged there need not be copied anywhere."""

OVERDUE_S = 5.0
"""How long an executor has, beyond its hard time limit, to end itself: its function may not let it."""

Settle = Callable[[AttemptView, Reason, bool], None]
"""Has a lost attempt placed again, or ended by its result; whether the loss counts."""


class Residents:
    """What placement wants on this node's devices, and what has become of it."""

    def __init__(self, store: Store, settings: Settings, settle: Settle, kill: Callable[[str], None]) -> None:
        self._store = store
        self._kill_proc = kill
        self._settle = settle
        broker = settings.broker
        self._layout = BrokerLayout(broker.global_keyprefix, broker.sep, broker.priority_steps)

    def look(
        self, views: Sequence[ExecutorView], now_s: float, workers: Mapping[str, Worker], *, draining: bool
    ) -> list[ExecutorView]:
        """Bury those whose process has ended, and say what is there. While the node is draining they all do.

        One that computes beyond its hard time limit (``now_s`` is by the server's clock), and has not ended itself, is
        killed.
        """
        alive = []
        for view in views:
            death = self._death(view, workers.get(post_name(view)), draining=draining)
            if death is not None:
                self.bury(view, death)
                continue
            if view.deadline_s is not None and now_s > view.deadline_s + OVERDUE_S:
                self._kill(view)
            if draining and view.phase is not Phase.DRAINING:
                self._store.drain_executor(view.name, DRAINING)
            alive.append(view)
        return alive

    def bury(self, view: ExecutorView, reason: Reason, *, counts: bool = True) -> None:
        """Put the items of an executor back, which has ended, and give up its reservation.

        ``counts``: its end counts as a loss for those that it had sealed.
        """
        for attempt in self._store.item_attempts([view]):
            self._settle(attempt, reason, counts and bool(attempt.boot))
        keys = [*self._layout.lists(view.queue), f"{self._layout.global_keyprefix}_kombu.binding.{view.queue}"]
        if self._store.executor_gone(view, view.reason or reason, keys):
            log.info("model executor %s is gone: %s", view.name, view.reason or reason)

    def _kill(self, view: ExecutorView) -> None:
        log.warning("model executor %s computes beyond its hard time limit: it is ended", view.name)
        self._kill_proc(view.proc)

    def _death(self, view: ExecutorView, worker: Worker | None, *, draining: bool) -> Reason | None:
        """How an executor has ended, if it has; one that has not begun yet may only be about to start."""
        runs = worker is not None and bool(worker.boot)
        if runs and worker is not None and view.boot in ("", worker.boot):
            return None
        if not view.boot and worker is None and not draining and view.phase is not Phase.DRAINING:
            return None
        if not view.boot and worker is not None and not worker.trouble:
            return None
        how = worker.trouble if worker is not None and worker.trouble else "is gone"
        return Reason("executor_died", f"the process of model executor {view.name} {how}")


def posts(views: Sequence[ExecutorView]) -> list[Post]:
    """The workers that these executors call for: those that drain and hold nothing may go."""
    return [
        Post(
            post_name(view),
            view.queue,
            (view.device,),
            pool=POOL,
            variables=((EXECUTOR, view.name),),
        )
        for view in views
        if view.phase is not Phase.DRAINING or view.items
    ]


def post_name(view: ExecutorView) -> str:
    """What its worker is called in its node: "gpu0.encoder"."""
    return f"gpu{view.index}.{view.name.removeprefix(f'{view.node}.{view.index}.')}"
