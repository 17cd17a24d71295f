"""The exceptions that brim's users meet: at publishing, in results, and when something is set up wrongly."""

from __future__ import annotations


class SetupError(ValueError):
    """The app and brim do not go together; the message names the setting and what it must be."""


class PublishRefused(ValueError):
    """A task cannot be published through brim: a field of its header or of its options is wrong."""


class TaskRejected(Exception):
    """brim gave a task up: it was not understood, fits no device, or was lost too often.

    It is the task's result, so `AsyncResult.get` raises it. ``code`` is stable (for example ``no_profile``);
    ``reason`` is a sentence for a person.
    """

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} [{self.code}]"


class TaskOutOfMemory(Exception):
    """The task ran out of memory; the message begins with the class of the exception that it raised.

    Frameworks derive theirs from `MemoryError`, which makes a Celery worker exit: the task's own code sees
    the framework's exception, everybody behind it this one.
    """
