"""Simulated devices: GPU memory that really runs out, shared by the processes of one machine.

Task code takes memory the way a framework would, and is refused what is not there::

    from brim.gpu import simulated

    with simulated.allocate(2048) as block:      # MiB, on the device that the agent gave this process
        block.resize(4096)                       # simulated.OutOfMemoryError if the device is full

The first allocation of a process also takes a simulated CUDA context (300 MiB, ``BRIM_SIM_CONTEXT_MIB``),
which stays until the process dies; with ``BRIM_SIM_CACHE=1`` freed memory stays with the process as well, for
its next allocations, like a framework's caching allocator. What a dead process held is free at once.

State is one file a device in the folder ``BRIM_SIM_DIR``, changed under ``flock``. A change is written beside
the state in force and then put in force by one eight-byte write, so a process killed at any point leaves the
old state or the new one. Files are opened anew for each operation: locks hold between threads and across
forks. Processes must share a pid namespace, as those of one node do.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.core.model import Reason
from brim.gpu.probe import DeviceFault, DeviceInfo, NodeFault, Sample
from brim.gpu.process import is_alive, proc_id

DEFAULT_CONTEXT_MIB = 300
UUID_PREFIX = "GPU-sim-"


class OutOfMemoryError(RuntimeError):
    """The simulated device, or the process's own limit, has not got the memory that was asked for."""


@dataclass(frozen=True, slots=True)
class Witness:
    """What truly happened on a device since its file was made, whatever anyone reported; it never resets.

    ``refused`` counts task allocations beyond the device's capacity, ``limited`` those beyond a process's own
    limit. ``most_tasks`` is the largest number of processes that held more than their context at one moment.
    """

    total_mib: int
    peak_mib: int
    refused: int
    limited: int
    most_tasks: int


# --- the books of one device -------------------------------------------------------------------------------


@dataclass
class _Process:
    """One process on one device: its context, what its allocator has and has handed out, what it holds."""

    context_mib: int | None = None
    allocated_mib: int = 0
    reserved_mib: int = 0
    held_mib: int = 0
    peak_mib: int = 0
    limit_mib: int | None = None

    @property
    def used_mib(self) -> int:
        return (self.context_mib or 0) + self.reserved_mib + self.held_mib


@dataclass
class _Books:
    """The state of one device; ``fault`` is a (code, message) while the device plays lost."""

    uuid: str
    index: int
    model: str
    total_mib: int
    processes: dict[str, _Process] = field(default_factory=dict)
    peak_mib: int = 0
    refused: int = 0
    limited: int = 0
    most_tasks: int = 0
    fault: tuple[str, str] | None = None

    @property
    def used_mib(self) -> int:
        return sum(process.used_mib for process in self.processes.values())

    @property
    def free_mib(self) -> int:
        return self.total_mib - self.used_mib

    @property
    def tasks(self) -> int:
        """Processes that hold more than their context."""
        return sum(process.allocated_mib > 0 for process in self.processes.values())

    def bury_the_dead(self) -> None:
        """Frees what dead processes held; it costs a look at each, so it is done only where it can matter."""
        self.processes = {proc: process for proc, process in self.processes.items() if is_alive(proc)}

    def mine(self) -> _Process:
        _users.add(os.getpid())
        return self.processes.setdefault(_me(), _Process())

    def witness(self) -> None:
        if self.used_mib > self.peak_mib or self.tasks > self.most_tasks:
            self.bury_the_dead()
        self.peak_mib = max(self.peak_mib, self.used_mib)
        self.most_tasks = max(self.most_tasks, self.tasks)

    def require(self, growth_mib: int, asked_mib: int) -> None:
        """Refuses growth beyond the device's capacity."""
        if growth_mib > self.free_mib:
            self.bury_the_dead()
        if growth_mib > max(self.free_mib, 0):
            raise OutOfMemoryError(
                f"out of memory on {self.uuid}: tried to allocate {asked_mib} MiB, "
                f"{self.free_mib} MiB of {self.total_mib} MiB are free"
            )

    def open_context(self, mib: int) -> None:
        """Takes the calling process's context, once."""
        process = self.mine()
        if process.context_mib is None:
            self._require_for_task(mib, mib)
            process.context_mib = mib

    def allocate(self, mib: int, *, cache: bool) -> None:
        """Moves what the calling process has allocated by that much, up or down."""
        process = self.mine()
        allocated = process.allocated_mib + mib
        reserved = max(process.reserved_mib, allocated) if cache else allocated
        growth = reserved - process.reserved_mib
        if process.limit_mib is not None and growth > 0 and reserved > process.limit_mib:
            self.limited += 1
            raise OutOfMemoryError(
                f"out of memory on {self.uuid}: tried to allocate {mib} MiB, this process may hold "
                f"{process.limit_mib} MiB and holds {process.reserved_mib} MiB"
            )
        self._require_for_task(growth, mib)
        process.allocated_mib, process.reserved_mib = allocated, reserved
        process.peak_mib = max(process.peak_mib, allocated)

    def hold(self, mib: int) -> None:
        """Moves what the calling process holds as an outside process by that much, up or down."""
        self.require(mib, mib)
        self.mine().held_mib += mib

    def _require_for_task(self, growth_mib: int, asked_mib: int) -> None:
        try:
            self.require(growth_mib, asked_mib)
        except OutOfMemoryError:
            self.refused += 1
            raise

    def to_bytes(self) -> bytes:
        return json.dumps(self, default=vars, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        values: dict[str, Any] = json.loads(data)
        processes = {proc: _Process(**process) for proc, process in values.pop("processes").items()}
        return cls(**values, processes=processes)


# The file: which half is in force and how long its JSON is, then the two halves.
_HEADER = struct.Struct("<II")
_HALF_BYTES = 1 << 17


def _write(fd: int, half: int, data: bytes) -> None:
    if len(data) > _HALF_BYTES:
        raise RuntimeError(f"too many processes on one simulated device: {len(data)} bytes of state")
    os.pwrite(fd, data, _HEADER.size + half * _HALF_BYTES)
    os.pwrite(fd, _HEADER.pack(half, len(data)), 0)


@contextmanager
def _books(path: Path, *, change: bool) -> Iterator[_Books]:
    """The device's books, locked; what the block changes is kept when it ends, or raises, with ``change``."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RuntimeError(
            f"no simulated device {path.stem!r} in {path.parent} (BRIM_SIM_DIR): "
            "the node agent makes those of its BRIM_DEVICES"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if change else fcntl.LOCK_SH)
        half, length = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        books = _Books.from_bytes(os.pread(fd, length, _HEADER.size + half * _HALF_BYTES))
        try:
            yield books
        finally:
            if change:
                books.witness()
                _write(fd, 1 - half, books.to_bytes())
    finally:
        os.close(fd)


def _create(path: Path, books: _Books) -> None:
    """Makes the device's file unless there is one; it appears complete or not at all."""
    if path.exists():
        return
    fd, name = tempfile.mkstemp(dir=path.parent)
    try:
        _write(fd, 0, books.to_bytes())
        os.link(name, path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)
        os.unlink(name)


# --- what task code uses -----------------------------------------------------------------------------------


def folder() -> Path:
    """The folder that holds the devices: ``BRIM_SIM_DIR``, else one per user in the temporary folder."""
    return Path(os.environ.get("BRIM_SIM_DIR") or Path(tempfile.gettempdir(), f"brim-simulated-{os.getuid()}"))


def visible() -> list[str]:
    """UUIDs of the devices given to this process: those of ``CUDA_VISIBLE_DEVICES``, else ``BRIM_DEVICE``."""
    for variable in ("CUDA_VISIBLE_DEVICES", "BRIM_DEVICE"):
        uuids = [uuid.strip() for uuid in os.environ.get(variable, "").split(",")]
        if simulated := [uuid for uuid in uuids if uuid.startswith(UUID_PREFIX)]:
            return simulated
    return []


_users: set[int] = set()
"""This process, once it has an entry in a device's books; a fork has its own."""


def is_initialized() -> bool:
    """Whether this process has ever used a simulated device, or been limited on one."""
    return os.getpid() in _users


class Allocation:
    """Memory held on a simulated device until ``free``, its ``with`` block's end, or the process's death."""

    def __init__(self, path: Path, move: Callable[[_Books, int], None]):
        self._path, self._move, self._owner = path, move, _me()
        self.mib = 0

    @property
    def uuid(self) -> str:
        """The device that it is on."""
        return self._path.stem

    def resize(self, mib: int) -> None:
        """Grows or shrinks to that many MiB; when refused (OutOfMemoryError) it keeps what it had."""
        if mib < 0:
            raise ValueError(f"mib={mib} is negative")
        if self._owner != _me():
            raise RuntimeError("this memory belongs to another process: device memory does not survive a fork")
        with _books(self._path, change=True) as books:
            self._move(books, mib - self.mib)
        self.mib = mib

    def free(self) -> None:
        """Gives it back; a second call does nothing."""
        if self.mib:
            self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


def allocate(
    mib: int, uuid: str | None = None, *, context_mib: int | None = None, cache: bool | None = None
) -> Allocation:
    """Takes MiB of device memory for this process, on its first visible device unless a UUID is given.

    ``context_mib`` is the size of the process's simulated CUDA context, taken with its first allocation on
    that device (default ``BRIM_SIM_CONTEXT_MIB``, else 300); ``cache`` keeps freed memory with the process
    (default ``BRIM_SIM_CACHE``). Raises OutOfMemoryError, with the numbers, when the device or the process's
    limit is short.
    """
    environ = os.environ
    context = int(environ.get("BRIM_SIM_CONTEXT_MIB", DEFAULT_CONTEXT_MIB)) if context_mib is None else context_mib
    caching = environ.get("BRIM_SIM_CACHE") == "1" if cache is None else cache

    def move(books: _Books, delta_mib: int) -> None:
        books.open_context(context)
        books.allocate(delta_mib, cache=caching)

    allocation = Allocation(_path(uuid), move)
    allocation.resize(mib)
    return allocation


def hold(uuid: str, mib: int) -> Allocation:
    """Takes MiB as a process from outside brim would: no context, and the witness counts no task."""
    allocation = Allocation(_path(uuid), _Books.hold)
    allocation.resize(mib)
    return allocation


def empty_cache(uuid: str | None = None) -> None:
    """Gives back what this process's caching allocator keeps."""
    with _books(_path(uuid), change=True) as books:
        process = books.mine()
        process.reserved_mib = process.allocated_mib


def peak_mib(uuid: str | None = None) -> int | None:
    """The most that this process had allocated at once since ``reset_peak``, without its context.

    None when it has never used the device.
    """
    with _books(_path(uuid), change=False) as books:
        process = books.processes.get(_me())
        return process.peak_mib if process is not None and process.context_mib is not None else None


def pool_mib(uuid: str | None = None) -> tuple[int, int]:
    """What this process's allocator has handed out now, and what it holds in all, without the context."""
    with _books(_path(uuid), change=False) as books:
        process = books.processes.get(_me(), _Process())
        return process.allocated_mib, process.reserved_mib


def reset_peak(uuid: str | None = None) -> None:
    """Starts the peak anew from what is allocated now."""
    with _books(_path(uuid), change=True) as books:
        process = books.mine()
        process.peak_mib = process.allocated_mib


def set_limit(mib: int | None, uuid: str | None = None) -> None:
    """Refuses this process, from now on, more than that many MiB beside its context; None lifts the limit."""
    with _books(_path(uuid), change=True) as books:
        books.mine().limit_mib = mib


# --- what the node and the tests use -----------------------------------------------------------------------


class SimulatedProbe:
    """The devices of a ``sim:`` setting, made in ``folder()`` where they are missing.

    A device's UUID follows from the folder, its index, size and model: a setting always names the same ones.
    """

    def __init__(self, spec: str):
        self._devices = parse_spec(spec)
        folder().mkdir(parents=True, exist_ok=True)
        self._paths = {device.uuid: _path(device.uuid) for device in self._devices}
        for device in self._devices:
            _create(self._paths[device.uuid], _Books(device.uuid, device.index, device.model, device.total_mib))

    def devices(self) -> list[DeviceInfo]:
        """Every device of the setting, faulty or not."""
        return list(self._devices)

    def sample(self) -> dict[str, Sample | DeviceFault]:
        """Each device's memory; the dead hold nothing."""
        return {uuid: _sample(path) for uuid, path in self._paths.items()}

    def close(self) -> None:
        """Nothing to let go of."""


def parse_spec(spec: str) -> list[DeviceInfo]:
    """The devices of a setting such as ``sim:2x24GiB:SIM-24,1x80GiB``: COUNTxSIZE[:MODEL] and commas."""
    devices: list[DeviceInfo] = []
    for group in spec.removeprefix("sim:").split(","):
        match = re.fullmatch(r"([1-9]\d*)x(\d+)(GiB|MiB)(?::([\w .-]+))?", group.strip())
        if match is None:
            raise NodeFault(
                Reason(
                    "devices_setting",
                    f"BRIM_DEVICES={spec!r}: {group!r} is not COUNTxSIZE as in '4x24GiB' or '4x24GiB:SIM-24'",
                )
            )
        count, size, unit, model = match.groups()
        total_mib = int(size) * (1024 if unit == "GiB" else 1)
        for _ in range(int(count)):
            devices.append(_device_info(len(devices), model or f"SIM-{size}{unit}", total_mib))
    return devices


def witness(directory: str | Path | None = None) -> dict[str, Witness]:
    """What happened on every device of the folder (default ``folder()``), by UUID."""
    found: dict[str, Witness] = {}
    for path in sorted(Path(directory or folder()).glob(f"{UUID_PREFIX}*.device")):
        with _books(path, change=False) as books:
            found[books.uuid] = Witness(books.total_mib, books.peak_mib, books.refused, books.limited, books.most_tasks)
    return found


def set_fault(uuid: str, reason: Reason | None) -> None:
    """Makes the device unreadable for probes, as a lost GPU is; None makes it well again."""
    with _books(_path(uuid), change=True) as books:
        books.fault = (reason.code, reason.message) if reason is not None else None


def _sample(path: Path) -> Sample | DeviceFault:
    with _books(path, change=False) as books:
        if books.fault is not None:
            return DeviceFault(books.uuid, Reason(*books.fault))
        books.bury_the_dead()
        processes: dict[int, int | None] = {
            int(proc.partition(".")[0]): process.used_mib
            for proc, process in books.processes.items()
            if process.used_mib
        }
        return Sample(books.total_mib, books.used_mib, books.free_mib, processes)


def _device_info(index: int, model: str, total_mib: int) -> DeviceInfo:
    identity = f"{os.uname().nodename}\0{folder().resolve()}\0{index}\0{model}\0{total_mib}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return DeviceInfo(f"{UUID_PREFIX}{digest[:8]}-{index}", index, model, total_mib)


def _path(uuid: str | None) -> Path:
    if uuid is None:
        uuids = visible()
        if not uuids:
            raise RuntimeError("no simulated device is visible: CUDA_VISIBLE_DEVICES or BRIM_DEVICE must name one")
        uuid = uuids[0]
    return folder() / f"{uuid}.device"


def _me() -> str:
    me = proc_id()
    assert me is not None, "a running process has an entry in /proc"
    return me
