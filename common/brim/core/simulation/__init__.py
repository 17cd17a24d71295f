"""Simulations of placement with the objects that the live service uses: nothing here decides anything itself."""

from brim.core.simulation.replay import Replay, replay
from brim.core.simulation.timed import Timed, possible, resample, simulate
from brim.core.simulation.town import ENDLESS_EXECUTORS, Job, Server, capacity_of, cluster_of

__all__ = [
    "ENDLESS_EXECUTORS",
    "Job",
    "Replay",
    "Server",
    "Timed",
    "capacity_of",
    "cluster_of",
    "possible",
    "replay",
    "resample",
    "simulate",
]
