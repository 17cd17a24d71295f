"""Placement: where a task goes. A pure decision on a mirror of the cluster (DESIGN, "Placement policy")."""

from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.explain import Candidate, Explanation, explain
from brim.core.placement.fit import node_shortage, place_name, shortage
from brim.core.placement.heads import Lane, Waiting
from brim.core.placement.mix import Mix
from brim.core.placement.planner import NO_PROMISES, Placement, Plan, Planner, PlannerSettings
from brim.core.placement.policy import PRESETS, Policy, make_policy
from brim.core.placement.promise import Beside, Promise

__all__ = [
    "NO_PROMISES",
    "PRESETS",
    "Beside",
    "Candidate",
    "Cluster",
    "Explanation",
    "Lane",
    "Mix",
    "Placement",
    "Plan",
    "Planner",
    "PlannerSettings",
    "Policy",
    "Promise",
    "Site",
    "Waiting",
    "explain",
    "make_policy",
    "node_shortage",
    "place_name",
    "shortage",
]
