"""What a task asks for after it ran out of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.retry import demand_after_out_of_memory


@pytest.mark.parametrize(
    ("vram_mib", "peak_mib", "offered_mib", "expected"),
    [
        pytest.param(2000, 1900, 2500, 3008, id="more was free than reserved: it wanted more"),
        pytest.param(2000, 1900, None, 3008, id="nobody can tell what was free: the demand may be wrong"),
        pytest.param(2000, 5000, 1000, 5120, id="it is known to have held more, whatever was free"),
        pytest.param(2000, 1500, 1800, 2000, id="somebody else has used what was its own"),
        pytest.param(2000, 0, 2000, 3008, id="its peak is not known"),
        pytest.param(6000, 0, None, 8000, id="no more than the largest device gives"),
        pytest.param(8000, 0, None, None, id="it has had the largest device"),
        pytest.param(8000, 100, 100, 8000, id="it has had the largest device, but others were on it"),
    ],
)
def test_demand_after_out_of_memory(
    vram_mib: int, peak_mib: int, offered_mib: int | None, expected: int | None
) -> None:
    found = demand_after_out_of_memory(vram_mib, peak_mib, offered_mib, largest_mib=8000)

    assert found == expected


@given(st.integers(1, 80_000), st.integers(0, 80_000), st.none() | st.integers(0, 80_000))
def test_it_never_shrinks_and_ends(vram_mib: int, peak_mib: int, offered_mib: int | None) -> None:
    """Each answer is at least what it was, and a growing one comes to its end."""
    demand: int | None = vram_mib
    for _ in range(40):
        assert demand is not None
        before, demand = demand, demand_after_out_of_memory(demand, peak_mib, offered_mib, largest_mib=80_000)
        if demand is None or demand == before:
            break
        assert before < demand <= 80_000
    else:
        pytest.fail("it grows without end")
