"""The names of brim's keys in Redis; docs/redis-keys.md says what each of them holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names below one prefix (the broker's ``global_keyprefix`` followed by brim's own prefix)."""

    prefix: str

    def task(self, task_id: str) -> str:
        """HASH: the record of one task."""
        return f"{self.prefix}task:{task_id}"

    def story(self, task_id: str) -> str:
        """LIST of JSON: what happened to a task."""
        return f"{self.prefix}story:{task_id}"

    def lane(self, lane: str) -> str:
        """ZSET: the ids that wait in one overflow lane, by order of priority and admission."""
        return f"{self.prefix}lane:{lane}"

    def book(self, uuid: str) -> str:
        """HASH: the book of one device."""
        return f"{self.prefix}device:{uuid}"

    def node(self, name: str) -> str:
        """HASH: one node and its lease."""
        return f"{self.prefix}node:{name}"

    def taskset(self, digest: str) -> str:
        """SET: the task names that a worker registered."""
        return f"{self.prefix}taskset:{digest}"

    def executor(self, name: str) -> str:
        """HASH: one model executor, and the items that it holds."""
        return f"{self.prefix}executor:{name}"

    def submission(self, task_id: str) -> str:
        """STRING: digest of the request that a task was first submitted with over HTTP."""
        return f"{self.prefix}submission:{task_id}"

    @property
    def executors(self) -> str:
        """SET of the model executors' names."""
        return f"{self.prefix}executors"

    @property
    def residency(self) -> str:
        """LIST of JSON: which model executors were wanted, came up, drained and went, and why."""
        return f"{self.prefix}residency"

    @property
    def lanes(self) -> str:
        """HASH lane -> JSON: what the tasks of a lane have in common."""
        return f"{self.prefix}lanes"

    @property
    def availability(self) -> str:
        """HASH uuid -> JSON: the availability table (requirement A3)."""
        return f"{self.prefix}availability"

    @property
    def nodes(self) -> str:
        """SET of node names."""
        return f"{self.prefix}nodes"

    @property
    def scheduled(self) -> str:
        """ZSET id -> eta in ms."""
        return f"{self.prefix}scheduled"

    @property
    def expiring(self) -> str:
        """ZSET id -> expiry in ms."""
        return f"{self.prefix}expiring"

    @property
    def awaited(self) -> str:
        """ZSET id -> since when (ms) the message of its next run is awaited: it was retried or replaced."""
        return f"{self.prefix}awaited"

    @property
    def tasks(self) -> str:
        """ZSET of all ids by their first admission, in 10 µs ticks since 2025."""
        return f"{self.prefix}tasks"

    @property
    def finished(self) -> str:
        """ZSET of terminal ids by their end in ms."""
        return f"{self.prefix}finished"

    @property
    def revoked(self) -> str:
        """ZSET id -> when (ms) Celery's revoke of it was heard."""
        return f"{self.prefix}revoked"

    @property
    def counts(self) -> str:
        """HASH state -> number of tasks."""
        return f"{self.prefix}counts"

    @property
    def outbox(self) -> str:
        """LIST of JSON: answers that brim owes to producers."""
        return f"{self.prefix}outbox"

    @property
    def changed(self) -> str:
        """SET: what placement has to look at again."""
        return f"{self.prefix}changed"

    @property
    def wake(self) -> str:
        """LIST of at most one element: placement's semaphore."""
        return f"{self.prefix}wake"

    @property
    def profiles(self) -> str:
        """HASH name or glob -> JSON: the published resource table."""
        return f"{self.prefix}profiles"

    @property
    def peaks(self) -> str:
        """LIST of JSON: the peaks of attempts that are over, for the learner."""
        return f"{self.prefix}peaks"

    @property
    def stand_ins(self) -> str:
        """HASH task -> JSON: the profiles that tasks without one got from intake."""
        return f"{self.prefix}stand_ins"

    @property
    def calibration(self) -> str:
        """HASH profile -> JSON: what was learned from peaks."""
        return f"{self.prefix}calibration"

    @property
    def calibration_version(self) -> str:
        """Integer: how often ``calibration`` has changed."""
        return f"{self.prefix}calibration_version"

    @property
    def signatures(self) -> str:
        """HASH task name -> JSON: what arguments a task takes."""
        return f"{self.prefix}signatures"

    @property
    def leader(self) -> str:
        """HASH: who is the active placement, its fencing epoch and lease."""
        return f"{self.prefix}leader"

    @property
    def seq(self) -> str:
        """Integer: the latest admission tick."""
        return f"{self.prefix}seq"

    @property
    def reports(self) -> str:
        """Pub/sub channel of memory reports."""
        return f"{self.prefix}reports"
