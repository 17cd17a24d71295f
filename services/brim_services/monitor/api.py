"""The HTTP API: what there is to ask and to do, under /v1."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from celery import Celery
from fastapi import APIRouter, Header, Path, Query, Response, Security, status
from fastapi.security import HTTPBearer

from brim.core.attributes import TaskSignature
from brim.core.model import TERMINAL, Reason, State
from brim.core.profiles import Profile, ResourceTable
from brim.settings import Settings
from brim.store import Store
from brim.store.types import CloseAnswer, Record
from brim_services.admission import NO_SIGNATURE, UNESTIMATED, Admitter, whole_gpu_mib
from brim_services.cancelling import cancel
from brim_services.expecting import expected
from brim_services.learning import Learned

from . import results
from .feed import Feed
from .problems import Refused, documented
from .schemas import (
    Accepted,
    Batch,
    BatchAnswer,
    BatchEntry,
    Cancelled,
    Cluster,
    Estimated,
    Profiles,
    Submission,
    Task,
    TaskDetail,
    TaskPage,
    Work,
    why_waiting,
)
from .streaming import EventStream
from .submission import Desk

MOST_WATCHERS = 200
EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "send the last one as Last-Event-ID to get only what has changed"},
        "event": {"const": "change"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/Change"},
        },
    },
    "required": ["id", "event", "data"],
}
SEE = {"description": "the task, with how it ended", "schema": {"type": "string", "format": "uri-reference"}}
TaskId = Annotated[str, Path(description="the Celery task id", min_length=1, max_length=255)]


class Operations:
    """What the API's operations do; each is one method."""

    def __init__(self, store: Store, settings: Settings, app: Celery, feed: Feed) -> None:
        self.store = store
        self.settings = settings
        self.app = app
        self.feed = feed
        self._texts: dict[str, str] = {}
        self._table = ResourceTable()
        self._learned = Learned(store)
        self.desk = Desk(store, settings, app, self.admitter)

    def admitter(self) -> Admitter:
        """What intake knows: the table that it has published and the signatures that workers have.

        Raises `Refused` (503) before intake has run.
        """
        texts = self.store.published_profiles()
        if not texts:
            raise Refused(503, Reason("no_table", "no resource table is published: intake has not run yet"))
        if texts != self._texts:
            self._texts, self._learned = texts, Learned(self.store)
            self._table = ResourceTable({name: Profile.model_validate_json(text) for name, text in texts.items()})
        self._learned.refresh(self._table.profiles)
        signatures = {name: TaskSignature.model_validate_json(text) for name, text in self.store.signatures().items()}
        settings = self.settings.intake
        return Admitter(
            self._table,
            signatures,
            settings.max_message_bytes,
            self._learned.by_profile,
            settings.unknown,
            whole_gpu_mib(self.store.devices()),
            self.settings.security.key,
        )

    def submit(self, task: Submission) -> Accepted:
        """Admits a task."""
        [answer] = self.desk.submit([task])
        if isinstance(answer, Accepted):
            return answer
        raise Refused(answer.status, Reason(answer.code, answer.detail), answer.errors)

    def submit_batch(self, batch: Batch) -> BatchAnswer:
        """Admits several tasks, each by itself."""
        answers = self.desk.submit(batch.tasks)
        return BatchAnswer(
            tasks=[
                BatchEntry(accepted=answer) if isinstance(answer, Accepted) else BatchEntry(problem=answer)
                for answer in answers
            ]
        )

    def task(self, task_id: str) -> TaskDetail:
        """A task with its story and its result."""
        record = self._record(task_id)
        detail = TaskDetail(**Task.of(record).model_dump(), story=self.store.story(task_id))
        if record.state is State.WAITING:
            [detail.position] = self.store.positions([(record.lane, task_id)])
            heads = {head.lane: head for head in self.store.lane_heads()}
            detail.reason = why_waiting(record.state, record.reason, heads.get(record.lane))
            start = expected(self.store, record)
            if isinstance(start, Reason):
                detail.expected_note = start
            else:
                detail.expected_start = start
        elif record.state in TERMINAL:
            detail.result, detail.error, detail.result_note = results.outcome(self.app, task_id)
        return detail

    def page(self, state: State | None, after: str | None, limit: int) -> TaskPage:
        """Some tasks."""
        found = self.store.page(state, after, limit)
        return TaskPage(tasks=[Task.of(record) for record in found.records], next=found.next)

    def cancel(self, task_id: str) -> Cancelled:
        """Cancels a task."""
        reason = Reason("cancelled", "cancelled through the HTTP API")
        answer = cancel(self.store, self.app, [task_id], reason)[task_id]
        if answer is CloseAnswer.UNKNOWN:
            raise _unknown(task_id)
        if answer is CloseAnswer.REFUSED:
            raise Refused(409, Reason("ended", f"task {task_id} has ended, or is just ending"))
        return Cancelled(id=task_id, status="cancelled" if answer is CloseAnswer.CLOSED else "cancelling")

    def retry(self, task_id: str) -> Accepted:
        """Tries a dead letter again."""
        record = self._record(task_id)
        if not self.store.revive(task_id, UNESTIMATED + record.task, NO_SIGNATURE):
            message = f"task {task_id} is not a dead letter, its message was not kept, or its answer is on the way"
            raise Refused(409, Reason("not_dead", message))
        record = self._record(task_id)
        return Accepted(id=task_id, state=record.state, vram_mib=record.demand.vram_mib, reason=record.reason)

    def _record(self, task_id: str) -> Record:
        record = self.store.record(task_id)
        if record is None:
            raise _unknown(task_id)
        return record


def _unknown(task_id: str) -> Refused:
    message = f"task {task_id} is not known: never admitted, or ended longer ago than placement.retention_s"
    return Refused(404, Reason("unknown_task", message))


def router(operations: Operations) -> APIRouter:
    """The routes under /v1."""
    api = APIRouter(prefix="/v1", dependencies=[Security(HTTPBearer(auto_error=False, description="see `brim token`"))])

    @api.post(
        "/tasks",
        status_code=status.HTTP_202_ACCEPTED,
        tags=["tasks"],
        summary="Submit a task",
        responses=documented(409),
    )
    def submit(task: Submission) -> Accepted:
        """Admitted at once, by the same admission as Celery's own messages; it runs as soon as a GPU has room."""
        return operations.submit(task)

    @api.post(
        "/tasks:batch",
        status_code=status.HTTP_202_ACCEPTED,
        tags=["tasks"],
        summary="Submit several tasks",
        responses=documented(),
    )
    def submit_batch(batch: Batch) -> BatchAnswer:
        """Each is accepted or refused by itself; the answers come in the order of the tasks."""
        return operations.submit_batch(batch)

    @api.get("/tasks", tags=["tasks"], summary="List tasks", responses=documented())
    def list_tasks(
        state: Annotated[State | None, Query(description="only those in this state")] = None,
        limit: Annotated[int, Query(ge=1, le=500, description="at most so many")] = 50,
        after: Annotated[str | None, Query(pattern="^[0-9]{1,16}$", description="an earlier page's `next`")] = None,
    ) -> TaskPage:
        """Newest first."""
        return operations.page(state, after, limit)

    @api.get("/tasks/{task_id}", tags=["tasks"], summary="A task with its story", responses=documented(404))
    def task(task_id: TaskId) -> TaskDetail:
        """Everything about one task, its result or error included once it has ended."""
        return operations.task(task_id)

    @api.delete(
        "/tasks/{task_id}",
        status_code=status.HTTP_303_SEE_OTHER,
        tags=["tasks"],
        summary="Cancel a task",
        responses=documented(404, 409) | {303: {"headers": {"Location": SEE}}},
    )
    def cancel_task(task_id: TaskId, answer: Response) -> Cancelled:
        """Wherever it is; a running one is terminated by its worker. The task is not gone then, so this is no 2xx:
        `Location` is where its story stays to be read."""
        cancelled = operations.cancel(task_id)
        answer.headers["Location"] = f"/v1/tasks/{quote(task_id, safe='')}"
        return cancelled

    @api.post(
        "/tasks/{task_id}/retry",
        status_code=status.HTTP_202_ACCEPTED,
        tags=["tasks"],
        summary="Retry a dead letter",
        responses=documented(404, 409),
    )
    def retry_task(task_id: TaskId) -> Accepted:
        """A new run of a task that brim had given up; it is estimated anew."""
        return operations.retry(task_id)

    @api.post("/estimate", tags=["tasks"], summary="Estimate a task's memory", responses=documented())
    def estimate(work: Work) -> Estimated:
        """How much memory the task would reserve, and why. Nothing is submitted."""
        return Estimated.of(work.name, operations.desk.estimate(work))

    @api.get("/cluster", tags=["cluster"], summary="Nodes, GPUs, overflow", responses=documented())
    def cluster() -> Cluster:
        """Everything that the page shows, at this moment."""
        return Cluster.of(operations.feed.look())

    @api.get("/profiles", tags=["cluster"], summary="The resource table", responses=documented())
    def profiles() -> Profiles:
        """How much memory tasks need, as intake has published it."""
        table = operations.store.published_profiles()
        return Profiles(profiles={name: Profile.model_validate_json(text).model_dump() for name, text in table.items()})

    @api.get(
        "/events",
        tags=["cluster"],
        summary="Server-sent events",
        response_class=Response,
        responses=documented() | {200: {"content": {"text/event-stream": {"schema": EVENT}}}},
    )
    async def events(last_event_id: Annotated[str | None, Header(max_length=64)] = None) -> EventStream:
        """`change` events: `full` says whether `gpus`, `nodes` and `lanes` are all of them or those that changed;
        the other fields are those of `/v1/cluster`, and `history` of the last 15 minutes."""
        if operations.feed.watchers >= MOST_WATCHERS:
            raise Refused(503, Reason("too_many_watchers", f"{MOST_WATCHERS} event streams are open"))
        return EventStream(operations.feed.follow(last_event_id))

    return api


__all__ = ["Operations", "router"]
