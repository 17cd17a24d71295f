"""Which row of the table names a task: exact names first, then the most specific glob."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

WILDCARDS = frozenset("*?[")


def is_glob(pattern: str) -> bool:
    """Whether the pattern can match more than the task of that very name."""
    return not WILDCARDS.isdisjoint(pattern)


def specificity(pattern: str) -> tuple[int, int, str]:
    """Sort key of globs, the most specific first.

    More characters outside wildcards win; on a tie the glob with fewer wildcards, then the alphabet,
    so that the choice never depends on the order in which patterns were stored.
    """
    wild = sum(character in WILDCARDS for character in pattern)
    return (wild - len(pattern), wild, pattern)


def best_match(task: str, patterns: Iterable[str]) -> str | None:
    """The pattern that speaks for the task: its exact name, else the most specific matching glob."""
    matching = [pattern for pattern in patterns if pattern == task or fnmatchcase(task, pattern)]
    if task in matching:
        return task
    return min(matching, key=specificity, default=None)
