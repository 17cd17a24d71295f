"""Who has outgrown what is reserved for it, and whom that endangers: given attempts and samples, then findings."""

import pytest

from brim.core.model import AttemptView, Reason, State
from brim.gpu.guard import excesses
from brim.gpu.probe import DeviceFault, Sample

U = "GPU-1"


def attempt(pid, vram_mib=1000, guard="hard", state=State.RUNNING):
    proc = f"{pid}.99" if pid else ""
    return AttemptView("t", f"1-{pid}", (U,), vram_mib, proc, state, "b00t", 0.0, 0.0, "lane", 300, guard)


def sample(total=8000, **processes):
    amounts = {int(name[1:]): mib for name, mib in processes.items()}
    used = sum(mib or 0 for mib in amounts.values())
    return {U: Sample(total, used, total - used, amounts)}


def found(attempts, samples, tolerance=0.1):
    return [
        (excess.attempt.attempt, excess.endangers, excess.ends) for excess in excesses(attempts, samples, tolerance)
    ]


def test_within_the_tolerance_nothing_is_wrong():
    assert found([attempt(1)], sample(p1=1100)) == []
    assert found([attempt(1)], sample(p1=1101)) == [("1-1", False, False)]


def test_an_excess_endangers_when_neighbours_could_not_take_what_is_theirs():
    neighbour = attempt(2, vram_mib=5000)
    assert found([attempt(1), neighbour], sample(p1=2900, p2=1100)) == [("1-1", False, False)]
    assert found([attempt(1), neighbour], sample(p1=3100, p2=1000)) == [("1-1", True, True)]


def test_an_attempt_that_has_not_begun_is_a_neighbour_with_all_of_its_reservation():
    assert found([attempt(1), attempt(0, vram_mib=6000)], sample(p1=2001)) == [("1-1", True, True)]


@pytest.mark.parametrize(
    ("accused", "ends"),
    [
        (attempt(1, guard="off"), None),
        (attempt(1, guard="soft"), False),
        (attempt(1, guard="hard"), True),
        (attempt(1, guard="hard", state=State.FINISHING), False),
    ],
)
def test_the_profile_says_what_happens(accused, ends):
    told = found([accused, attempt(2, vram_mib=5000)], sample(p1=4000, p2=0))
    assert told == ([] if ends is None else [("1-1", True, ends)])


def test_what_is_not_known_accuses_nobody():
    assert found([attempt(1)], sample(p1=None)) == []
    assert found([attempt(1)], {U: DeviceFault(U, Reason("device_lost", "lost"))}) == []
    assert found([attempt(1)], {}) == []
    assert found([attempt(1), attempt(2, vram_mib=9000)], sample(p1=2000, p2=None)) == [("1-1", False, False)]


def test_the_reason_tells_amounts():
    [excess] = excesses([attempt(1), attempt(2, vram_mib=7000)], sample(p1=2000, p2=0), 0.1)
    assert "uses 2000 MiB, 1000 MiB are reserved" in excess.reason.message
    assert "for others" in excess.reason.message
