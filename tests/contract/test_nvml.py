"""NVML with every case of its facts page, each a test: unmodified nvidia-ml-py on the project's own stand-in."""

import shutil

import pytest

from brim.core.model import Reason
from brim.gpu.probe import DeviceFault, DeviceInfo, NodeFault, Sample
from contract.nvml_standin import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    LIB_RM_VERSION_MISMATCH,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN,
    Driver,
    Prober,
    build,
)
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the stand-in is built with cc")

MIB = 1 << 20
A, B, C = "GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"
M0, M1 = "MIG-0000", "MIG-1111"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(tmp_path):
    return Driver(tmp_path / "state")


@pytest.fixture
def probing(library, driver):
    """Starts probers, by default on the complete stand-in, and closes them."""
    started = []

    def start(environment=None, folder=library, **options):
        driver.write()
        started.append(Prober(folder, driver.path, environment, **options))
        return started[-1]

    yield start
    for prober in started:
        prober.close()


def code_of(fault):
    assert isinstance(fault, DeviceFault)
    return fault.reason.code


# --- memory of a device ------------------------------------------------------------------------------------


def test_memory_v2_leaves_the_drivers_reserve_out(driver, probing):
    driver.gpu(A, total=24 * GIB, reserved=512 * MIB, used=GIB, name="NVIDIA A100")
    node = probing()

    assert node.devices() == [DeviceInfo(A, 0, "NVIDIA A100", 24 * 1024 - 512)]
    assert node.sample() == {A: Sample(24 * 1024 - 512, 1024, 23 * 1024 - 512, {})}


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, UNKNOWN])
def test_memory_v2_that_fails_falls_back_to_v1(driver, probing, code):
    driver.gpu(A, reserved=512 * MIB, used=GIB).answer(A, "MemoryInfo_v2", code)
    node = probing()

    assert node.devices()[0].total_mib == 24 * 1024
    assert node.sample() == {A: Sample(24 * 1024, 1024 + 512, 23 * 1024 - 512, {})}


def test_a_library_without_memory_v2_falls_back_to_v1(driver, probing, tmp_path):
    driver.gpu(A, reserved=512 * MIB)
    node = probing(folder=build(tmp_path / "old", "WITHOUT_MEMORY_V2"))

    assert node.devices()[0].total_mib == 24 * 1024


def test_memory_is_followed_while_it_changes(driver, probing):
    driver.gpu(A)
    node = probing()
    node.devices()
    for used_gib in (1, 20, 3):
        driver.gpu(A, used=used_gib * GIB).write()
        assert node.sample()[A].used_mib == used_gib * 1024


# --- processes ---------------------------------------------------------------------------------------------


def test_processes_that_compute_and_draw_are_listed_once_each(driver, probing):
    driver.gpu(A).process(A, 10, GIB).process(A, 11, 5, "Graphics")
    driver.process(A, 12, 2 * GIB).process(A, 12, 2 * GIB, "Graphics")
    node = probing()
    node.devices()

    sample = node.sample()[A]
    assert sample.processes == {10: 1024, 11: 1, 12: 2048}
    assert (sample.of(12), sample.of(99)) == (2048, 0)


def test_process_memory_that_is_not_available_is_none_and_never_zero(driver, probing):
    driver.gpu(A).process(A, 10, None).process(A, 11, GIB).process(A, 11, None, "Graphics")
    node = probing()
    node.devices()

    sample = node.sample()[A]
    assert sample.processes == {10: None, 11: 1024}
    assert sample.of(10) is None


def test_host_pids_in_a_container_leave_its_processes_unknown(driver, probing):
    driver.gpu(A, used=GIB).process(A, 10, GIB)
    node = probing()
    node.devices()
    node.ask("in_a_container")

    sample = node.sample()[A]
    assert sample == Sample(24 * 1024, 1024, 23 * 1024, {}, complete=False)
    assert sample.of(10) is None


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
def test_a_refused_process_list_leaves_processes_unknown_and_memory_known(driver, probing, code):
    driver.gpu(A, used=GIB).process(A, 10, GIB).answer(A, "ComputeRunningProcesses", code)
    node = probing()
    node.devices()

    assert node.sample()[A] == Sample(24 * 1024, 1024, 23 * 1024, {}, complete=False)


def test_a_refused_list_of_drawing_processes_is_just_absent(driver, probing):
    driver.gpu(A).process(A, 10, GIB).answer(A, "GraphicsRunningProcesses", NOT_SUPPORTED)
    node = probing()
    node.devices()

    assert node.sample()[A].processes == {10: 1024}


def test_a_driver_without_the_v3_process_list_serves_its_v2(driver, probing, tmp_path):
    """nvidia-ml-py raises NVMLLibraryMismatchError there, which is no NVMLError."""
    driver.gpu(A).process(A, 10, GIB).process(A, 11, MIB, "Graphics")
    node = probing(folder=build(tmp_path / "old", "WITHOUT_V3"))
    node.devices()

    assert node.sample()[A].processes == {10: 1024, 11: 1}


def test_a_driver_that_changed_the_v3_process_structure_serves_its_v2(driver, probing):
    driver.set("stride", 32).gpu(A).process(A, 10, GIB).process(A, 11, 2 * GIB).process(A, 12, None)
    node = probing()
    node.devices()

    assert node.sample()[A].processes == {10: 1024, 11: 2048, 12: None}


def test_a_driver_without_any_process_list_leaves_processes_unknown(driver, probing):
    driver.gpu(A).process(A, 10, GIB)
    for name in ("ComputeRunningProcesses", "ComputeRunningProcesses_v2"):
        driver.answer(A, name, FUNCTION_NOT_FOUND)
    node = probing()
    node.devices()

    assert not node.sample()[A].complete


# --- which devices -----------------------------------------------------------------------------------------


def test_zero_gpus_are_no_fault(probing):
    node = probing()
    assert node.devices() == []
    assert node.sample() == {}


def test_devices_are_followed_by_uuid_when_their_order_changes(driver, probing):
    driver.gpu(A, used=GIB).gpu(B, used=2 * GIB)
    node = probing()
    node.devices()
    driver.without(A, B).gpu(B, used=3 * GIB).gpu(A, used=4 * GIB).write()

    assert {uuid: sample.used_mib for uuid, sample in node.sample().items()} == {A: 4096, B: 3072}


def test_the_instances_of_a_gpu_in_mig_mode_are_the_devices(driver, probing):
    driver.gpu(A).gpu(B, name="NVIDIA A100").mig(B, M0, 5 * GIB, used=GIB).mig(B, M1, 10 * GIB)
    driver.process(M0, 10, GIB).answer(M0, "GraphicsRunningProcesses", NOT_SUPPORTED)
    node = probing()

    assert [(d.uuid, d.index, d.total_mib) for d in node.devices()] == [
        (A, 0, 24 * 1024),
        (M0, 200, 5 * 1024),
        (M1, 201, 10 * 1024),
    ]
    assert node.sample()[M0] == Sample(5 * 1024, 1024, 4 * 1024, {10: 1024})


def test_a_gpu_in_mig_mode_without_instances_is_no_device(driver, probing):
    driver.gpu(A).mig_mode(A).gpu(B)

    assert [device.uuid for device in probing().devices()] == [B]


def test_mig_devices_are_read_without_asking_the_parent(driver, probing):
    driver.gpu(A).mig(A, M0, 5 * GIB)
    for refused in ("MemoryInfo", "MemoryInfo_v2", "MigMode", "ComputeRunningProcesses"):
        driver.answer(A, refused, NO_PERMISSION)
    node = probing()

    assert [device.uuid for device in node.devices()] == [M0]
    assert node.sample()[M0] == Sample(5 * 1024, 0, 5 * 1024, {})


def test_a_mig_device_that_was_destroyed_is_a_fault_and_found_again(driver, probing):
    driver.gpu(A).mig(A, M0, 5 * GIB).mig(A, M1, 5 * GIB)
    node = probing()
    node.devices()
    driver.without(M0).write()
    samples = node.sample()
    assert code_of(samples[M0]) == "device_gone"
    assert samples[M1].free_mib == 5 * 1024

    driver.mig(A, M0, 5 * GIB).write()
    assert node.sample()[M0].free_mib == 5 * 1024


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("1,2", [B, C]),
        (B, [B]),
        ("GPU-cccc,0", [A, C]),
        ("", []),
        ("-1", []),
    ],
)
def test_an_outer_mask_grants_only_its_devices(driver, probing, mask, seen):
    driver.gpu(A).gpu(B).gpu(C)
    node = probing({"CUDA_VISIBLE_DEVICES": mask})

    assert [device.uuid for device in node.devices()] == seen
    assert list(node.sample()) == seen


def test_numbers_in_a_mask_are_refused_among_gpus_of_several_models(driver, probing):
    driver.gpu(A, name="NVIDIA X").gpu(B, name="NVIDIA Y")
    with pytest.raises(NodeFault, match=r"CUDA_VISIBLE_DEVICES holds '0'.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        probing({"CUDA_VISIBLE_DEVICES": "0"}).devices()

    by_bus = probing({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [device.uuid for device in by_bus.devices()] == [B]


# --- faults of a device ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [(GPU_IS_LOST, "device_lost"), (RESET_REQUIRED, "device_needs_reset"), (UNKNOWN, "device_unreadable")],
)
def test_a_gpu_that_cannot_be_read_is_quarantined_alone(driver, probing, answer, code):
    driver.gpu(A).gpu(B)
    node = probing()
    node.devices()
    driver.answer(A, "*", answer).write()

    samples = node.sample()
    assert code_of(samples[A]) == code
    assert A in samples[A].reason.message
    assert samples[B].free_mib == 24 * 1024


def test_the_first_error_says_why_when_a_gpu_cannot_be_found_anew(driver, probing):
    driver.gpu(A)
    node = probing()
    node.devices()
    driver.answer(A, "HandleByUUID", NOT_FOUND)
    driver.answer(A, "MemoryInfo", RESET_REQUIRED).answer(A, "MemoryInfo_v2", RESET_REQUIRED).write()

    assert code_of(node.sample()[A]) == "device_needs_reset"


def test_a_lost_gpu_comes_back_once_nvml_is_started_again(driver, probing):
    # given: a GPU that was lost and has come back, which NVML does not see until it starts again
    driver.gpu(A)
    node = probing()
    node.devices()
    driver.answer(A, "*", GPU_IS_LOST).write()
    assert code_of(node.sample()[A]) == "device_lost"
    driver.without(f"{A} *").write()
    assert code_of(node.sample()[A]) == "device_lost"

    # when: the time to start NVML again has come
    node.ask("restart_due")

    # then
    assert node.sample()[A].free_mib == 24 * 1024


def test_a_gpu_that_is_lost_at_the_start_is_left_out_and_listed_when_it_is_back(driver, probing):
    driver.gpu(A).gpu(B).answer(A, "*", GPU_IS_LOST)
    node = probing()
    assert [(d.uuid, d.index) for d in node.devices()] == [(B, 1)]

    driver.without(f"{A} *").write()
    node.ask("close")
    assert [(d.uuid, d.index) for d in node.devices()] == [(A, 0), (B, 1)]


def test_a_fatal_xid_event_quarantines_its_gpu_for_a_while(driver, probing):
    driver.gpu(A).gpu(B).mig(B, M0, 5 * GIB)
    node = probing(quarantine_xids=[79], quarantine_s=0.3)
    node.devices()
    driver.xid(A, 13).write()
    assert isinstance(node.sample()[A], Sample)

    driver.xid(B, 79).write()
    samples = node.sample()
    assert samples[M0] == DeviceFault(M0, Reason("device_xid", f"{B} reported Xid 79; it is in quarantine for 0.3 s"))
    assert isinstance(samples[A], Sample)

    wait_until(lambda: isinstance(node.sample()[M0], Sample), what="the end of its quarantine")


def test_xid_events_that_cannot_be_had_are_just_not_heard(driver, probing):
    driver.gpu(A).answer(A, "RegisterEvents", NOT_SUPPORTED)
    node = probing(quarantine_xids=[79])
    node.devices()
    assert isinstance(node.sample()[A], Sample)

    driver.answer("*", "EventSetCreate", FUNCTION_NOT_FOUND)
    node = probing(quarantine_xids=[79])
    node.devices()
    assert isinstance(node.sample()[A], Sample)


# --- faults of the node ------------------------------------------------------------------------------------


def test_a_missing_driver_is_a_node_fault_that_says_what_to_do(driver, probing, tmp_path):
    with pytest.raises(NodeFault, match=r"libnvidia-ml\.so\.1 is not found.*BRIM_DEVICES=sim") as fault:
        probing(folder=tmp_path).devices()
    assert fault.value.reason.code == "nvml_library_missing"


@pytest.mark.parametrize(
    ("answer", "code"),
    [(DRIVER_NOT_LOADED, "nvml_driver_not_loaded"), (LIB_RM_VERSION_MISMATCH, "nvml_driver_mismatch")],
)
def test_a_driver_that_is_not_loaded_or_mismatched_is_a_node_fault(driver, probing, answer, code):
    driver.set("init", answer).gpu(A)
    with pytest.raises(NodeFault) as fault:
        probing().devices()
    assert fault.value.reason.code == code


def test_a_driver_that_goes_away_is_a_node_fault_until_it_is_back(driver, probing):
    driver.gpu(A)
    node = probing()
    node.devices()
    driver.answer(A, "*", DRIVER_NOT_LOADED).set("init", DRIVER_NOT_LOADED).write()
    for _ in range(2):
        with pytest.raises(NodeFault, match="kernel module is not loaded"):
            node.sample()

    driver.without(f"{A} *", "init").write()
    assert node.sample()[A].free_mib == 24 * 1024


def test_the_deprecated_package_that_hides_nvidia_ml_py_is_named(probing, tmp_path):
    hidden = tmp_path / "old" / "pynvml"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("")
    with pytest.raises(NodeFault, match=f"{hidden}.*pip uninstall pynvml") as fault:
        probing({"PYTHONPATH": str(hidden.parent)}).devices()
    assert fault.value.reason.code == "nvml_shadowed"


# --- processes that fork, and the end ----------------------------------------------------------------------


def test_nvml_is_started_again_after_a_fork(driver, probing):
    driver.gpu(A, used=GIB).process(A, 10, GIB)
    node = probing()
    node.devices()

    assert node.sample("sample_after_fork") == node.sample() == {A: Sample(24 * 1024, 1024, 23 * 1024, {10: 1024})}


def test_a_closed_probe_starts_again_when_it_is_used(driver, probing):
    driver.gpu(A)
    node = probing()
    node.devices()
    node.ask("close")
    assert node.sample()[A].free_mib == 24 * 1024
