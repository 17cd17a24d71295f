"""`brim profiles`: what the table declares, what measured peaks suggest, and what is reserved by it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from brim.core.calibration import Calibration, Lesson, Suggestion
from brim.core.profiles import Profile, ResourceTable
from brim.core.table_edit import change_fields
from brim_services.learning import restored


@dataclass(frozen=True, slots=True)
class Standing:
    """A profile and what is known about it.

    ``typical_mib``: what the newest task that was learned from would reserve, as declared and as learned.
    """

    profile: Profile
    lessons: Sequence[Lesson]
    suggestion: Suggestion | None
    typical_mib: tuple[int, int] | None
    in_table: bool = True
    """Otherwise intake made it for a task that has none."""

    @property
    def effective(self) -> str:
        """Which of the two is reserved: ``declared`` or ``learned``."""
        return "learned" if self.profile.calibration == "on" and self.typical_mib else "declared"

    def to_json(self) -> dict[str, object]:
        """Everything, for scripts."""
        suggested = self.suggestion
        return {
            "profile": self.profile.name,
            "in_table": self.in_table,
            "calibration": self.profile.calibration,
            "declared": {"vram": str(self.profile.vram), "margin": self.profile.margin},
            "suggested": suggested and {"vram": str(suggested.vram), "margin": suggested.margin},
            "effective": self.effective,
            "typical_mib": self.typical_mib and dict(zip(("declared", "learned"), self.typical_mib, strict=True)),
            "gpu_models": [
                {
                    "gpu_model": lesson.gpu_model,
                    "samples": lesson.samples,
                    "out_of_memory": lesson.out_of_memory,
                    "error_p50": lesson.median_error,
                    "error_p99": lesson.p99_error,
                }
                for lesson in self.lessons
            ],
        }


def standings(
    table: ResourceTable, states: Mapping[str, bytes], stand_ins: Mapping[str, Profile]
) -> Iterator[Standing]:
    """Every profile of the table, then those that intake made for tasks without one.

    What was learned about a profile that was changed since counts for nothing.
    """
    for profile in table:
        yield _standing(profile, restored(profile, states.get(profile.name)), in_table=True)
    for name in sorted(stand_ins.keys() - table.profiles.keys()):
        yield _standing(stand_ins[name], restored(stand_ins[name], states.get(name)), in_table=False)


def _standing(profile: Profile, known: Calibration, *, in_table: bool) -> Standing:
    typical_mib = None
    summands = known.newest()
    if summands is not None:
        declared_mib = known.declared_mib(summands)
        learned_mib = known.reserve_mib(summands, declared_mib, profile.gpu_models)
        if learned_mib is not None:
            typical_mib = (round(declared_mib), round(learned_mib))
    return Standing(profile, known.lessons(), known.suggestion(), typical_mib, in_table)


def standings_table(found: Sequence[Standing]) -> Table:
    """For a terminal: one row for each profile and GPU model."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("profile", "calibration", "GPU model", "samples", "out of memory", "error p50", "p99"):
        table.add_column(column, justify="left" if column in ("profile", "calibration", "GPU model") else "right")
    for column in ("declared", "suggested", "effective"):
        table.add_column(column, overflow="fold")
    for standing in found:
        profile, suggestion = standing.profile, standing.suggestion
        words = (_words(str(profile.vram), profile.margin), "–", standing.effective)
        if suggestion is not None:
            words = (words[0], _words(str(suggestion.vram), suggestion.margin), words[2])
        for first, lesson in enumerate(standing.lessons or [None]):
            about = ("–", "0", "0", "–", "–") if lesson is None else _about(lesson)
            label = profile.name if standing.in_table else f"{profile.name} (no profile)"
            name = (label, profile.calibration) if first == 0 else ("", "")
            table.add_row(*name, *about, *(words if first == 0 else ("", "", "")))
    return table


def _about(lesson: Lesson) -> tuple[str, ...]:
    errors = (lesson.median_error, lesson.p99_error)
    told = ("–" if error is None else f"{error:.2f}" for error in errors)
    return (lesson.gpu_model, str(lesson.samples), str(lesson.out_of_memory), *told)


def _words(vram: str, margin: float) -> str:
    return f"{margin:g} × ({vram})"


def apply(path: Path, found: Sequence[Standing]) -> list[str]:
    """Writes suggestions for profiles of the table at ``path`` into it, all or none; what was changed, a line each.

    Comments and order stay. Raises `TableError` where a profile cannot be changed by itself.
    """
    text, changes = path.read_text(), []
    for standing in found:
        if standing.suggestion is not None and standing.in_table:
            profile, suggestion = standing.profile, standing.suggestion
            vram, margin = str(suggestion.vram), suggestion.margin
            text = change_fields(text, str(path), profile.name, {"vram": vram, "margin": margin})
            was, now = _words(str(profile.vram), profile.margin), _words(vram, margin)
            changes.append(f"{profile.name}: {now} instead of {was}")
    if changes:
        beside = path.with_name(path.name + ".new")
        beside.write_text(text)
        beside.chmod(path.stat().st_mode)
        os.replace(beside, path)
    return changes
