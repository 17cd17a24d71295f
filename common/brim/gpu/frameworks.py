"""The GPU memory that frameworks count themselves in this process: their peaks, their limits, their errors.

Nothing here imports a framework: only one that the task's process has loaded by itself is asked, and asking starts
no CUDA context that the task has not started. Amounts are MiB of the framework's own pool, on the device where it
is largest, without the process's context. What a framework fails at is logged and unknown: a task never fails by
being measured.

JAX and TensorFlow fix their share of a device when they start (``XLA_PYTHON_CLIENT_MEM_FRACTION``; TensorFlow's
logical devices), before a task could set it: their errors are recognised, their peaks and limits are not.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)

_MIB = 1 << 20


def begin() -> None:
    """Starts the peak counters of all loaded frameworks anew, for the attempt that begins."""
    _ask_each(lambda framework: framework.begin())


def peak_mib() -> int | None:
    """The peak since ``begin``, summed over frameworks; None when none of them has used a device.

    Of a framework that was loaded since then, the peak since it was loaded.
    """
    peaks = [peak for peak in _ask_each(lambda framework: framework.peak_mib()) if peak]
    return sum(peaks) if peaks else None


@dataclass(frozen=True, slots=True)
class Pool:
    """What frameworks' pools hold of a device now, in MiB: handed out to the task, and in all."""

    allocated_mib: int = 0
    held_mib: int = 0


def pool() -> Pool:
    """The pools of all loaded frameworks together."""
    pools = _ask_each(lambda framework: framework.pool())
    return Pool(sum(pool.allocated_mib for pool in pools), sum(pool.held_mib for pool in pools))


def limit(mib: int | None) -> None:
    """Makes every loaded framework refuse more than that many MiB beside the context; None lifts the limits.

    Before it is limited, a pool gives back what earlier attempts left in it. A framework that this process loads
    later is not limited.
    """
    _ask_each(lambda framework: framework.limit(mib))


# --- the frameworks --------------------------------------------------------------------------------------------


class _Framework(Protocol):
    """One framework; its methods are called only while its module is loaded."""

    module: str

    def begin(self) -> None: ...
    def peak_mib(self) -> int | None: ...
    def pool(self) -> Pool: ...
    def limit(self, mib: int | None) -> None: ...


T = TypeVar("T")
F = TypeVar("F", bound=_Framework)


class _Torch:
    """PyTorch, whose caching allocator counts its own peaks.

    What it reserves is what the device lacks, fragmentation included; but that includes what earlier attempts left
    in its cache. So only a pool that has grown since ``begin`` measures this attempt. One that has not served the
    attempt from its cache, and the most that was allocated is the peak.
    """

    module = "torch"

    def __init__(self) -> None:
        self._reserved_before: dict[int, int] = {}
        self._limit_mib: int | None = None
        self._limit_is_queued = False

    def begin(self) -> None:
        self._reserved_before = {}
        for cuda, device in self._devices():
            self._reserved_before[device] = cuda.memory_reserved(device)
            cuda.reset_peak_memory_stats(device)

    def peak_mib(self) -> int | None:
        peaks = []
        for cuda, device in self._devices():
            reserved = cuda.max_memory_reserved(device)
            grown = reserved > self._reserved_before.get(device, 0)
            peaks.append(reserved if grown else cuda.max_memory_allocated(device))
        return _largest_mib(peaks)

    def pool(self) -> Pool:
        devices = list(self._devices())
        allocated = _largest_mib(cuda.memory_allocated(device) for cuda, device in devices)
        return Pool(allocated or 0, _largest_mib(cuda.memory_reserved(device) for cuda, device in devices) or 0)

    def limit(self, mib: int | None) -> None:
        cuda = _loaded(self.module).cuda
        self._limit_mib = mib
        if cuda.is_initialized():
            self._apply_limit()
        elif not self._limit_is_queued:
            # Setting it now would start CUDA, whether or not the task wants it: it joins what torch itself puts
            # off until CUDA starts.
            self._limit_is_queued = True
            cuda._lazy_call(lambda: _ask(self, _Torch._apply_limit))

    def _apply_limit(self) -> None:
        cuda = _loaded(self.module).cuda
        if self._limit_mib is not None:
            cuda.empty_cache()
        for device in range(cuda.device_count()):
            total = cuda.get_device_properties(device).total_memory
            share = 1.0 if self._limit_mib is None else min(1.0, self._limit_mib * _MIB / total)
            cuda.set_per_process_memory_fraction(share, device)

    def _devices(self) -> Iterator[tuple[Any, int]]:
        cuda = _loaded(self.module).cuda
        if cuda.is_initialized():
            yield from ((cuda, device) for device in range(cuda.device_count()))


class _CuPy:
    """CuPy, whose pool counts no peak but only grows until it is emptied: emptied at ``begin``, its size is one."""

    module = "cupy"

    def begin(self) -> None:
        for pool in self._pools():
            pool.free_all_blocks()

    def peak_mib(self) -> int | None:
        return _largest_mib(pool.total_bytes() for pool in self._pools())

    def pool(self) -> Pool:
        sizes = [(pool.used_bytes(), pool.total_bytes()) for pool in self._pools()]
        allocated = _largest_mib(used for used, _ in sizes)
        return Pool(allocated or 0, _largest_mib(total for _, total in sizes) or 0)

    def limit(self, mib: int | None) -> None:
        for pool in self._pools():
            pool.set_limit(size=0 if mib is None else mib * _MIB)

    def _pools(self) -> Iterator[Any]:
        """The default pool with each device current in turn; changing the device would start a context on it."""
        cupy = _loaded(self.module)
        count = cupy.cuda.runtime.getDeviceCount()
        for device in range(count):
            with cupy.cuda.Device(device) if count > 1 else nullcontext():
                yield cupy.get_default_memory_pool()


class _Simulated:
    """The simulated devices that are visible to this process; as with CUDA, one that it has not used costs nothing."""

    module = "brim.gpu.simulated"

    def begin(self) -> None:
        for simulated, uuid in self._devices():
            simulated.reset_peak(uuid)

    def peak_mib(self) -> int | None:
        peaks = [simulated.peak_mib(uuid) for simulated, uuid in self._devices()]
        return max((peak for peak in peaks if peak is not None), default=None)

    def pool(self) -> Pool:
        pools = [simulated.pool_mib(uuid) for simulated, uuid in self._devices()]
        return Pool(max((allocated for allocated, _ in pools), default=0), max((held for _, held in pools), default=0))

    def limit(self, mib: int | None) -> None:
        if mib is None:
            for simulated, uuid in self._devices():
                simulated.set_limit(None, uuid)
            return
        simulated = _loaded(self.module)
        for uuid in simulated.visible():
            simulated.empty_cache(uuid)
            simulated.set_limit(mib, uuid)

    def _devices(self) -> Iterator[tuple[Any, str]]:
        simulated = _loaded(self.module)
        if simulated.is_initialized():
            yield from ((simulated, uuid) for uuid in simulated.visible())


_FRAMEWORKS: tuple[_Framework, ...] = (_Torch(), _CuPy(), _Simulated())


def _ask_each(question: Callable[[_Framework], T]) -> list[T]:
    loaded = [framework for framework in _FRAMEWORKS if framework.module in sys.modules]
    return [answer for framework in loaded for answer in _ask(framework, question)]


def _ask(framework: F, question: Callable[[F], T]) -> list[T]:
    """The answer, or none when the framework fails at it."""
    try:
        return [question(framework)]
    except Exception as error:
        logger.warning("%s does not tell or limit its memory: %s", framework.module, error)
        return []


def _loaded(module: str) -> Any:
    return sys.modules[module]


def _largest_mib(amounts: Iterable[int]) -> int | None:
    largest = max(amounts, default=None)
    return None if largest is None else -(-largest // _MIB)


# --- their errors ----------------------------------------------------------------------------------------------

# (top-level package, class, what its message must hold): by name, since nothing here imports a framework.
_OUT_OF_MEMORY = (
    ("brim", "OutOfMemoryError", ""),
    ("torch", "OutOfMemoryError", ""),
    ("torch", "AcceleratorError", "out of memory"),
    ("builtins", "RuntimeError", "CUDA out of memory"),
    ("builtins", "RuntimeError", "CUDA error: out of memory"),
    ("cupy", "OutOfMemoryError", ""),
    ("cupy_backends", "CUDARuntimeError", "cudaErrorMemoryAllocation"),
    ("jaxlib", "XlaRuntimeError", "RESOURCE_EXHAUSTED"),
    ("jaxlib", "JaxRuntimeError", "RESOURCE_EXHAUSTED"),
    ("jax", "JaxRuntimeError", "RESOURCE_EXHAUSTED"),
    ("tensorflow", "ResourceExhaustedError", ""),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, says that a device's memory did not suffice.

    Known are those of PyTorch, CuPy, JAX, TensorFlow and the simulated devices.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if _says_out_of_memory(current):
            return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def _says_out_of_memory(error: BaseException) -> bool:
    classes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return any((package, name) in classes and words in str(error) for package, name, words in _OUT_OF_MEMORY)


_ASKED = re.compile(r"allocat(?:e|ing) ([\d,]+(?:\.\d+)?) ?(TiB|GiB|MiB|KiB|bytes?|B)\b")
_UNIT_MIB = {"TiB": 1 << 20, "GiB": 1 << 10, "MiB": 1, "KiB": 1 / (1 << 10)}


def asked_mib(error: BaseException) -> int | None:
    """MiB that an "out of memory" error says were asked for, rounded up; None where it does not say."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    return math.ceil(float(found[1].replace(",", "")) * _UNIT_MIB.get(found[2], 1 / (1 << 20)))
