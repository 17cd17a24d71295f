"""Charts of simulations, drawn into a file by matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(reports: Mapping[str, Any], path: Path, *, timed: bool) -> None:
    """Two charts of the reports of `brim_services.simulate`, ``waits`` if ``timed``, else ``fills``.

    The format follows from the file's name. Raises `ModuleNotFoundError` without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    (_draw_waits if timed else _draw_fills)(left, right, reports)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path)


def _draw_fills(allocated: Axes, fragments: Axes, reports: Mapping[str, Any]) -> None:
    """Allocation and fragmentation over the load that has arrived, one line for each policy."""
    for policy, report in reports.items():
        ways = {policy: report} | ({f"{policy}, learning the mix": report["online"]} if "online" in report else {})
        for name, way in ways.items():
            loads = [int(load) for load in way["allocated_pct"]]
            allocated.plot(loads, list(way["allocated_pct"].values()), label=name)
            fragments.plot(loads, list(way["fragmentation_pct"].values()), label=name)
    for axes, what in ((allocated, "allocated"), (fragments, "fragments")):
        axes.set(xlabel="GPU memory asked for so far, % of the capacity", ylabel=f"{what}, % of the capacity")


def _draw_waits(utilisation: Axes, waits: Axes, reports: Mapping[str, Any]) -> None:
    """Utilisation and mean wait over the offered load, one line for each policy."""
    loads = [float(load) for load in reports]
    for policy in next(iter(reports.values())):
        of_policy = [policies[policy] for policies in reports.values()]
        utilisation.plot(loads, [row["utilisation_pct"] for row in of_policy], marker="o", label=policy)
        waits.plot(loads, [row["mean_wait_s"] / 60 for row in of_policy], marker="o", label=policy)
    utilisation.set(xlabel="offered load", ylabel="utilisation, %")
    waits.set(xlabel="offered load", ylabel="mean wait, minutes")
