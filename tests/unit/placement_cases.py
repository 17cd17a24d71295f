"""Random clusters and lanes for the placement tests, and the checks that every plan must pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from brim.core.model import Demand, Device, Node
from brim.core.placement import Cluster, Lane, Plan, Waiting, shortage

TASKS = {"all": frozenset({"segment", "train"}), "some": frozenset({"segment"}), "none": frozenset[str]()}
GIB = 1024


def device(node: str = "a", index: int = 0, **fields: object) -> Device:
    values: dict[str, object] = {
        "uuid": f"GPU-{node}-{index}",
        "node": node,
        "index": index,
        "model": "A100",
        "total_mib": 24 * GIB,
        "headroom_mib": 512,
        "external_mib": 0,
        "committed_mib": 0,
        "executors": 4,
        "busy": 0,
        "tasks": "all",
    }
    return Device(**(values | fields))  # type: ignore[arg-type]


def cluster_of(devices: Iterable[Device], nodes: Iterable[Node] = ()) -> Cluster:
    cluster = Cluster(TASKS)
    for node in nodes:
        cluster.update_node(node)
    for each in devices:
        cluster.update(each)
    return cluster


def lane(key: str, demand: Demand, *scores: float, task: str = "segment", admitted_s: float = 0.0) -> Lane:
    return Lane(key, task, demand, [Waiting(f"{key}-{score:g}", score, admitted_s) for score in scores])


@st.composite
def devices(draw: st.DrawFn) -> list[Device]:
    made = []
    for node in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]])):
        for index in range(draw(st.integers(1, 4))):
            total = draw(st.sampled_from([8, 16, 24])) * GIB
            made.append(
                device(
                    node,
                    index,
                    model=draw(st.sampled_from(["A100", "T4", "A100 MIG 1g.5gb"])),
                    total_mib=total,
                    external_mib=draw(st.sampled_from([0, 0, 700])),
                    committed_mib=draw(st.integers(0, total)),
                    reclaimable_mib=draw(st.sampled_from([0, 0, 900])),
                    executors=draw(st.integers(1, 4)),
                    busy=draw(st.integers(0, 3)),
                    tasks=draw(st.sampled_from(["all", "all", "some", "none"])),
                    state=draw(st.sampled_from(["up", "up", "up", "draining"])),
                )
            )
    return made


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    return [
        Node(
            name,
            labels=draw(st.sampled_from([{}, {"zone": "x"}])),
            cpus=draw(st.sampled_from([0.0, 8.0])),
            ram_mib=draw(st.sampled_from([0, 32 * GIB])),
            cpus_used=draw(st.sampled_from([0.0, 2.0])),
        )
        for name in draw(st.sampled_from([[], ["a"], ["a", "b", "c"]]))
    ]


demands = st.builds(
    Demand,
    vram_mib=st.sampled_from([100, 1000, 5000, 12_000, 30_000]),
    gpus=st.sampled_from([1, 1, 1, 2, 4]),
    cpus=st.sampled_from([0.0, 1.0, 4.0, 7.0, 9.0]),
    ram_mib=st.sampled_from([0, 0, 20 * GIB, 40 * GIB]),
    gpu_models=st.sampled_from([(), (), ("A100",), ("T4", "A100")]),
    labels=st.sampled_from([(), (), (("zone", "x"),)]),
)


@st.composite
def lanes(draw: st.DrawFn) -> list[Lane]:
    made = []
    for number in range(draw(st.integers(0, 5))):
        scores = sorted(draw(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True)))
        task = draw(st.sampled_from(["segment", "train"]))
        made.append(lane(f"lane{number}", draw(demands), *scores, task=task))
    return made


def check_plan(plan: Plan, cluster: Cluster, lanes: Sequence[Lane], ahead: int) -> None:
    """The plan can be committed placement by placement, and every lane is served or knows why not."""
    by_key = {lane.key: lane for lane in lanes}
    placed: dict[str, list[str]] = {}
    for placement in plan.placements:
        lane = by_key[placement.lane]
        assert placement.demand == lane.demand
        assert len(set(placement.devices)) == lane.demand.gpus
        for uuid in placement.devices:
            chosen = cluster.device(uuid)
            assert chosen is not None
            assert cluster.runs(chosen, lane.task)
            assert shortage(chosen, lane.demand, ahead) is None
        cluster.reserve(placement.devices, lane.demand)
        placed.setdefault(placement.lane, []).append(placement.task_id)
    for lane in lanes:
        done = placed.get(lane.key, [])
        assert done == [waiting.task_id for waiting in lane.waiting[: len(done)]]
        if len(done) < len(lane.waiting):
            reason = plan.waits[lane.key]
            assert reason.code
            assert reason.message
        else:
            assert lane.key not in plan.waits
    for site in cluster:
        for each in site.devices:
            before_was_over = each.busy > each.executors + ahead or each.available_mib < 0
            touched = any(each.uuid in placement.devices for placement in plan.placements)
            assert not (touched and before_was_over)
