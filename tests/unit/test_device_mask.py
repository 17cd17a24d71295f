"""An outer CUDA_VISIBLE_DEVICES grants exactly what it names, or says why it cannot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.gpu.mask import granted
from brim.gpu.probe import DeviceInfo, NodeFault


def device(index, uuid=None, model="X"):
    return DeviceInfo(uuid or f"GPU-{index:04x}-{index}", index, model, 1000)


def test_without_a_mask_everything_is_granted():
    devices = [device(0), device(1, model="Y")]
    assert granted(devices, None, None) == devices


def test_an_unknown_entry_grants_nothing_and_hides_nothing():
    assert granted([device(0), device(1)], "GPU-ffff,7,1", None) == [device(1)]


def test_what_follows_minus_one_is_not_granted():
    assert granted([device(0), device(1)], "1,-1,0", None) == [device(1)]


def test_a_device_named_twice_is_granted_once():
    assert granted([device(0)], "0,0,GPU-0000", None) == [device(0)]


@pytest.mark.parametrize("entry", ["GPU-", "0"])
def test_an_entry_that_could_mean_several_devices_is_refused(entry):
    with pytest.raises(NodeFault, match=f"holds '{entry}'"):
        granted([device(0, model="X"), device(1, model="Y")], entry, "FASTEST_FIRST")


def test_numbers_never_name_mig_devices():
    mig = device(100, uuid="MIG-1")
    with pytest.raises(NodeFault, match="MIG"):
        granted([mig], "0", "PCI_BUS_ID")
    assert granted([mig], "MIG-1", None) == [mig]


@given(st.integers(1, 8), st.data())
def test_any_way_of_naming_a_subset_grants_that_subset(count, data):
    devices = [device(index) for index in range(count)]
    chosen = data.draw(st.lists(st.sampled_from(devices), unique=True))
    names = [data.draw(st.sampled_from([d.uuid, d.uuid[:8], str(d.index)])) for d in chosen]

    assert granted(devices, ",".join(names), None) == sorted(chosen, key=lambda d: d.index)
