"""The node's Celery workers under the agent's supervision: one for each device, and others on demand."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Mapping

from brim.celery.agent_link import WorkerIdentity
from brim.core.posts import Post, Worker
from brim.gpu.process import proc_id
from brim.settings import Settings
from brim_services import keeper
from brim_services.supervise import Backoff, Child, Command, Supervisor

from .watch import Watch, ending

log = logging.getLogger("brim.agent")

MAIN = ""
"""In place of a worker's name, for its own main process."""
GRACE_S = 10.0
"""How long an idle worker may take to stop."""
STEADY_S = 10.0
"""A worker that lived this long was no failure to start: its next pause is the shortest again."""
SLOW_S = 60.0
"""A worker that is not ready after this long is not waited for any more, though it may still become so."""


class PostWorker:
    """The worker of one post: who it is now, and whether it has said that it is ready."""

    def __init__(self, post: Post, node: str, agent: str) -> None:
        self.post = post
        self.child: Child | None = None
        self.said_ready = False
        self.trouble = ""
        self.asked_at: float | None = None
        """When it was asked to end, by the monotonic clock."""
        self.identity = self._new_identity(node, agent)

    def begin(self) -> Mapping[str, str]:
        """A new boot, and the environment that says so."""
        self.said_ready = False
        self.identity = self._new_identity(self.identity.node, self.identity.agent)
        return {**dict(self.post.variables), **self.identity.variables()}

    @property
    def runs(self) -> bool:
        """Whether its main process is there."""
        return self.child is not None and self.child.pid is not None

    def is_settled(self, seen: Worker) -> bool:
        """Whether all of it is there, or need not be waited for: it has died before, or takes too long."""
        if self.child is None or self.child.failures > 0 or time.monotonic() - self.child.started_at > SLOW_S:
            return True
        return seen.ready and len(seen.executors) >= self.post.concurrency

    def seen(self, watch: Watch) -> Worker:
        """What is seen of it; without executors it is not ready, whatever it says."""
        executors = watch.living(self.post.name)
        boot = self.identity.boot if self.runs else ""
        return Worker(
            self.post,
            boot,
            bool(boot) and self.said_ready and bool(executors),
            executors,
            self.child.failures if self.child else 0,
            self.trouble,
            self.asked_at is not None,
        )

    def _new_identity(self, node: str, agent: str) -> WorkerIdentity:
        post = self.post
        return WorkerIdentity(node, post.name, post.queue, post.devices, secrets.token_hex(8), agent)


class Workers:
    """All workers of the node. They start, die and start again here; what that means is decided elsewhere."""

    def __init__(
        self, supervisor: Supervisor, settings: Settings, app: str, node: str, agent: str, watch: Watch
    ) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self._app = app
        self._node = node
        self._agent = agent
        """Address at which workers tell the agent that they are ready."""
        self._watch = watch
        self.by_name: dict[str, PostWorker] = {}
        self.endings: dict[str, str] = {}
        """How worker processes ended, by boot."""

    def start_all(self, posts: Iterable[Post]) -> None:
        """Forget what was before, and start a worker on each of these posts."""
        self.by_name = {}
        self.endings.clear()
        for post in posts:
            self.start(post)

    def start(self, post: Post) -> None:
        """Start a worker on a post, which greets the agent when it is ready."""
        worker = self.by_name[post.name] = PostWorker(post, self._node, self._agent)
        worker.child = self._supervisor.start(self._command(worker))
        log.info("%s: worker started, log in %s", worker.identity.hostname, worker.child.log)
        self._watch_mains()

    def seen(self) -> dict[str, Worker]:
        """What is seen of the workers, by name."""
        return {name: worker.seen(self._watch) for name, worker in self.by_name.items()}

    @property
    def settled(self) -> bool:
        """Whether the node can be of use: some standing workers are ready, and the others need not be waited for."""
        standing = [(worker, worker.seen(self._watch)) for worker in self.by_name.values() if worker.post.standing]
        ready = any(seen.ready for _, seen in standing)
        return ready and all(worker.is_settled(seen) for worker, seen in standing)

    def poll(self) -> None:
        """Notice deaths, start again what is due, and watch what runs."""
        before = {name: (worker.identity.boot, worker.said_ready) for name, worker in self.by_name.items()}
        for death in self._supervisor.poll():
            boot, was_ready = before[death.name]
            worker = self.by_name[death.name]
            worker.trouble = self.endings[boot] = ending(-death.code if death.code < 0 else death.code << 8)
            if worker.asked_at is not None:
                log.info("%s: worker has ended", worker.identity.hostname)
                self._drop(death.name)
                continue
            log.warning("%s", death)
            if not was_ready:
                lines = self._supervisor.children[death.name].last_lines(10)
                log.warning("%s never was ready; its log ends:\n%s", death.name, lines)
        self._watch_mains()

    def next_restart_s(self) -> float | None:
        """Seconds until a dead worker is started again; None where none is due."""
        due = [w.child.restart_at for w in self.by_name.values() if w.child and w.child.restart_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def of_boot(self, boot: str) -> PostWorker | None:
        """The worker that runs with this boot."""
        return next((w for w in self.by_name.values() if w.identity.boot == boot and w.runs), None)

    def kill(self, name: str) -> None:
        """End a worker, and its executors with it; it counts as a death and starts again."""
        child = self.by_name[name].child
        if child is not None and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)

    def retire(self, name: str) -> None:
        """Have a worker end that runs nothing, without waiting; said again after `GRACE_S`, it is killed."""
        worker = self.by_name[name]
        if not worker.runs:
            self._drop(name)
        elif worker.asked_at is None:
            worker.asked_at = time.monotonic()
            log.info("%s: worker is not needed any more", worker.identity.hostname)
            self._supervisor.ask_to_end(name)
        elif time.monotonic() - worker.asked_at > GRACE_S:
            self.kill(name)

    def kill_all(self) -> None:
        """End all workers at once, and do not start them again."""
        keeper.kill_sessions([w.child.pid for w in self.by_name.values() if w.child and w.child.pid])
        self.stop()

    def stop(self) -> None:
        """Stop all workers in order, idle ones within `GRACE_S`."""
        if self.by_name:
            self._supervisor.stop(*self.by_name)

    def _drop(self, name: str) -> None:
        """Forget a worker that has ended and is not to start again."""
        del self.by_name[name]
        self._supervisor.forget(name)

    def _watch_mains(self) -> None:
        """Have the agent wake up when a worker's main process ends.

        It serves no device as an executor does, but where tasks run in threads of its own.
        """
        for worker in self.by_name.values():
            pid = worker.child.pid if worker.child else None
            proc = proc_id(pid) if pid else None
            if proc is not None:
                self._watch.add(worker.post.name if worker.post.pool == "threads" else MAIN, proc)

    def _command(self, worker: PostWorker) -> Command:
        agent, post = self._settings.agent, worker.post
        options = {
            "--hostname": worker.identity.hostname,
            "--queues": post.queue,
            "--concurrency": str(post.concurrency),
            "--pool": post.pool,
            "--prefetch-multiplier": "1",
            "--loglevel": "INFO",
        }
        flags = ["--task-events", "--without-mingle", "--without-gossip"]
        arguments = [part for option in options.items() for part in option]
        return Command(
            post.name,
            [sys.executable, "-m", "celery", "--app", self._app, "worker", *arguments, *flags],
            environment=self._settings.environment(),
            variables=worker.begin,
            restart=Backoff(agent.restart_backoff_s, agent.restart_backoff_max_s, STEADY_S),
            grace_s=GRACE_S,
        )
