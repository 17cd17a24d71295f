"""What frameworks tell of their memory. PyTorch and CuPy are small fakes with the calls that brim makes, in
sys.modules; the simulated device is the real one."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from brim.gpu import frameworks, simulated
from brim.gpu.probe import open_probe

MIB = 1 << 20


class FakeCuda:
    """torch.cuda with one pool per device; reading before CUDA has started fails the test."""

    def __init__(self, devices=1, total_mib=1000):
        self.started = False
        self.queued = []
        self.total_mib = total_mib
        self.shares = {}
        self.pools = [SimpleNamespace(reserved=0, allocated=0, peak_r=0, peak_a=0) for _ in range(devices)]

    def start(self):
        for call in self.queued:
            call()
        self.started = True

    def use(self, mib, device=0):
        """A task allocates and frees that much: the pool keeps it."""
        pool = self.pools[device]
        pool.reserved = max(pool.reserved, mib * MIB)
        pool.peak_r = max(pool.peak_r, pool.reserved)
        pool.peak_a = max(pool.peak_a, mib * MIB)

    def is_initialized(self):
        return self.started

    def _lazy_call(self, call):
        self.queued.append(call)

    def device_count(self):
        return len(self.pools)

    def memory_reserved(self, device):
        assert self.started
        return self.pools[device].reserved

    def memory_allocated(self, device):
        assert self.started
        return self.pools[device].allocated

    def max_memory_reserved(self, device):
        assert self.started
        return self.pools[device].peak_r

    def max_memory_allocated(self, device):
        assert self.started
        return self.pools[device].peak_a

    def reset_peak_memory_stats(self, device):
        pool = self.pools[device]
        pool.peak_r, pool.peak_a = pool.reserved, pool.allocated

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=self.total_mib * MIB)

    def empty_cache(self):
        for pool in self.pools:
            pool.reserved = pool.allocated

    def set_per_process_memory_fraction(self, share, device):
        self.shares[device] = share


class FakePool:
    def __init__(self):
        self.total = self.used = self.limit = 0

    def total_bytes(self):
        return self.total

    def used_bytes(self):
        return self.used

    def free_all_blocks(self):
        self.total = self.used

    def set_limit(self, size):
        self.limit = size


@pytest.fixture(autouse=True)
def no_framework(monkeypatch):
    """No framework is loaded, and what was asked of one in another test is forgotten."""
    for name in ("torch", "cupy", "brim.gpu.simulated"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    fresh = tuple(type(framework)() for framework in frameworks._FRAMEWORKS)
    monkeypatch.setattr(frameworks, "_FRAMEWORKS", fresh)


def load(monkeypatch, name, **contents):
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    load(monkeypatch, "torch", cuda=cuda)
    return cuda


@pytest.fixture
def pool(monkeypatch):
    pool = FakePool()
    runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    load(monkeypatch, "cupy", cuda=SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool)
    return pool


def test_without_a_framework_the_peak_is_unknown():
    frameworks.begin()
    frameworks.limit(100)
    assert frameworks.peak_mib() is None


def test_torch_that_has_not_started_cuda_is_not_asked_and_not_started(cuda):
    frameworks.begin()
    assert frameworks.peak_mib() is None
    assert not cuda.started


def test_torch_tells_what_its_pool_grew_to(cuda):
    cuda.start()
    cuda.use(100)
    frameworks.begin()
    cuda.use(300)
    assert frameworks.peak_mib() == 300


def test_torch_tells_what_was_allocated_from_the_cache_of_earlier_attempts(cuda):
    cuda.start()
    cuda.use(900)
    frameworks.begin()
    cuda.use(200)
    assert frameworks.peak_mib() == 200


def test_torch_started_by_the_task_itself_tells_its_peak(cuda):
    frameworks.begin()
    cuda.start()
    cuda.use(50)
    assert frameworks.peak_mib() == 50


def test_the_peak_is_that_of_the_device_where_it_is_largest(monkeypatch):
    cuda = FakeCuda(devices=2)
    load(monkeypatch, "torch", cuda=cuda)
    cuda.start()
    cuda.use(50, device=0)
    cuda.use(70, device=1)
    assert frameworks.peak_mib() == 70


def test_pools_tell_what_they_hold_now(cuda, pool):
    cuda.start()
    cuda.pools[0].reserved, cuda.pools[0].allocated = 500 * MIB, 200 * MIB
    pool.total, pool.used = 70 * MIB, 30 * MIB
    assert frameworks.pool() == frameworks.Pool(allocated_mib=230, held_mib=570)


def test_without_a_framework_nothing_is_held():
    assert frameworks.pool() == frameworks.Pool(0, 0)


def test_a_limit_on_torch_waits_until_the_task_starts_cuda_and_the_last_one_counts(cuda):
    frameworks.limit(100)
    frameworks.limit(250)
    assert cuda.shares == {}

    cuda.start()
    assert cuda.shares == {0: 0.25}
    frameworks.limit(500)
    assert cuda.shares == {0: 0.5}
    frameworks.limit(None)
    assert cuda.shares == {0: 1.0}
    frameworks.limit(5000)
    assert cuda.shares == {0: 1.0}


def test_a_limit_that_fails_when_cuda_starts_does_not_fail_the_task(cuda, monkeypatch, caplog):
    frameworks.limit(100)
    monkeypatch.setattr(cuda, "device_count", lambda: 1 / 0)
    cuda.start()
    assert cuda.started
    assert "torch does not tell or limit its memory" in caplog.text


def test_cupy_tells_the_size_of_its_pool_emptied_at_the_beginning(pool):
    pool.total = 900 * MIB
    frameworks.begin()
    assert frameworks.peak_mib() is None
    pool.total = 200 * MIB
    assert frameworks.peak_mib() == 200


def test_cupy_is_limited_in_bytes_and_freed_by_none(pool):
    frameworks.limit(100)
    assert pool.limit == 100 * MIB
    frameworks.limit(None)
    assert pool.limit == 0


def test_cupy_is_asked_device_by_device(monkeypatch):
    current, pools = [0], [FakePool(), FakePool()]

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current[0] = self.device

        def __exit__(self, *error):
            current[0] = 0

    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    load(
        monkeypatch,
        "cupy",
        cuda=SimpleNamespace(runtime=runtime, Device=Device),
        get_default_memory_pool=lambda: pools[current[0]],
    )
    pools[1].total = 30 * MIB
    frameworks.limit(40)
    assert [pool.limit for pool in pools] == [40 * MIB, 40 * MIB]
    assert frameworks.peak_mib() == 30
    assert current == [0]


def test_peaks_of_several_frameworks_add_up(cuda, pool):
    cuda.start()
    cuda.use(100)
    pool.total = 10 * MIB
    assert frameworks.peak_mib() == 110


def test_a_framework_that_fails_is_unknown_and_fails_no_task(monkeypatch, pool, caplog):
    load(monkeypatch, "torch")
    frameworks.begin()
    frameworks.limit(10)
    pool.total = 10 * MIB
    assert frameworks.peak_mib() == 10
    assert "torch does not tell or limit its memory" in caplog.text


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "brim.gpu.simulated", simulated)
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path))
    (device,) = open_probe("sim:1x1000MiB").devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device.uuid)
    return device


def test_the_simulated_device_tells_its_peak(device):
    frameworks.begin()
    assert frameworks.peak_mib() is None
    simulated.allocate(400).free()
    frameworks.begin()
    simulated.allocate(100, cache=True).free()
    assert frameworks.peak_mib() == 100


def test_the_simulated_device_is_limited(device):
    frameworks.limit(100)
    with pytest.raises(simulated.OutOfMemoryError):
        simulated.allocate(101)
    frameworks.limit(None)
    simulated.allocate(101).free()


# --- errors ------------------------------------------------------------------------------------------------


def error_of(module, name, base=RuntimeError):
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    "error",
    [
        simulated.OutOfMemoryError("full"),
        error_of("torch", "OutOfMemoryError")("CUDA out of memory. Tried to allocate 20.00 GiB"),
        error_of("torch.cuda", "OutOfMemoryError")("..."),
        error_of("torch", "AcceleratorError")("CUDA error: out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA out of memory. Tried to allocate"),
        error_of("cupy.cuda.memory", "OutOfMemoryError", MemoryError)("Out of memory allocating 8 bytes"),
        error_of("cupy_backends.cuda.api.runtime", "CUDARuntimeError")("cudaErrorMemoryAllocation: out of memory"),
        error_of("jaxlib.xla_extension", "XlaRuntimeError")("RESOURCE_EXHAUSTED: Out of memory while trying"),
        error_of("jax.errors", "JaxRuntimeError")("RESOURCE_EXHAUSTED: Out of memory"),
        error_of("tensorflow.python.framework.errors_impl", "ResourceExhaustedError", Exception)("OOM when"),
        error_of("my.tasks", "TooBig", error_of("torch", "OutOfMemoryError"))("wrapped"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_out_of_memory_errors_are_recognised_by_name(error):
    assert frameworks.is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("the host's own memory"),
        RuntimeError("out of memory in my head"),
        error_of("redis.exceptions", "OutOfMemoryError")("command not allowed"),
        error_of("jaxlib.xla_extension", "XlaRuntimeError")("INVALID_ARGUMENT"),
        error_of("torch", "AcceleratorError")("an illegal memory access was encountered"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_other_errors_are_not(error):
    assert not frameworks.is_out_of_memory(error)


def test_an_error_raised_from_one_counts_and_a_disowned_one_does_not():
    def raised(how):
        try:
            try:
                raise simulated.OutOfMemoryError("full")
            except simulated.OutOfMemoryError as error:
                how(error)
        except ValueError as outer:
            return outer

    def chained(error):
        raise ValueError("no result") from error

    def implicit(error):
        raise ValueError("while handling it")

    def disowned(error):
        raise ValueError("something else") from None

    assert frameworks.is_out_of_memory(raised(chained))
    assert frameworks.is_out_of_memory(raised(implicit))
    assert not frameworks.is_out_of_memory(raised(disowned))


def test_a_chain_that_bites_its_tail_ends():
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    assert not frameworks.is_out_of_memory(first)


@pytest.mark.parametrize(
    ("message", "mib"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.6 GiB", 2560),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20),
        ("Out of memory allocating 1,048,577 bytes (allocated so far: 0 bytes).", 2),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.", 4096),
        ("out of memory on GPU-sim-0: tried to allocate 900 MiB, 100 MiB of 8192 MiB are free", 900),
        ("CUDA error: out of memory", None),
    ],
)
def test_what_was_asked_for_is_read_from_the_error(message, mib):
    assert frameworks.asked_mib(RuntimeError(message)) == mib
