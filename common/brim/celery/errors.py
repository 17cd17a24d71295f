"""Exceptions that producers meet."""

from __future__ import annotations


class TaskRejected(Exception):
    """brim gave a task up: it was not understood, fits no device, or was lost too often.

    ``code`` is stable (for example ``no_profile``); ``reason`` is a sentence for a person.
    """

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} [{self.code}]"
