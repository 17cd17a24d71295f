"""Taking over what an agent before has left in the table, on a real server."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator

import pytest
import redis

from brim.core.model import AttemptView, Demand, Identity, Node, Reason
from brim.gpu.process import proc_id
from brim.settings import ConfigurationError
from brim.store import Store
from brim.store.types import Admission, Commit, DeviceRegistration, ExecutorView, NodeRegistration, Peeked
from brim_services.agent.takeover import Boot, take_over

ELSEWHERE = "b00t@another-machine:10.1"
OLD, NEW = "GPU-old", "GPU-new"


def unexpected(view: ExecutorView, reason: Reason) -> None:
    """No model executor is in these tests' books."""
    raise AssertionError(f"{view.name}: {reason}")


@pytest.fixture
def store(valkey_url: str, namespace: str) -> Iterator[Store]:
    client = redis.Redis.from_url(valkey_url)
    store = Store(client, f"{namespace}brim:")
    yield store
    assert store.audit() == []
    client.close()


class Settled:
    """Loses what it is given, as the agent does, and remembers it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reasons: list[Reason] = []

    def __call__(self, attempt: AttemptView, reason: Reason) -> None:
        self._store.lose(attempt, reason, counts=True, max_attempts=3)
        self.reasons.append(reason)


@pytest.fixture
def settled(store: Store) -> Settled:
    return Settled(store)


def register(store: Store, boot: str, name: str = "n1") -> None:
    devices = [DeviceRegistration(uuid, index, "SIM", 1000, 0) for index, uuid in enumerate((OLD, "GPU-gone"))]
    assert store.register_node(NodeRegistration(Node(name), boot, 1, [], {}, devices))


def run_task(store: Store, proc: str) -> None:
    """A task that the earlier agent's executor runs."""
    epoch, _ = store.elect("test", 60)
    key = f"{store.keys.prefix}list"
    store.client.lpush(key, b"raw")
    source = Peeked(key, b"raw")
    store.admit([Admission(source, Identity("a", 0, 0), "t", "t|1", Demand(1), 0, 0, b"<", b">")])
    store.commit(epoch, [Commit("a", "t|1", "1-1", [OLD], "n1", f"{key}.gpu", 1, b"")], 0)
    store.claim("a", "1-1", "w1")
    store.bind("a", "1-1", [OLD], proc)


def test_a_dead_agents_attempts_are_settled_its_processes_ended_and_its_devices_gone(
    store: Store, settled: Settled
) -> None:
    with subprocess.Popen(["sleep", "60"]) as executor, subprocess.Popen(["sleep", "60"]) as agent:
        boot = Boot("b00t", Boot.mine().machine, proc_id(agent.pid) or "")
        agent.kill()
        agent.wait()
        register(store, str(boot))
        run_task(store, proc_id(executor.pid) or "")

        # The processes of the dead are seen by /proc, where ours stay zombies until they are waited for.
        take_over(store, "n1", [OLD, NEW], 15.0, settled, unexpected)
        assert executor.wait(5) == -9

    assert [reason.code for reason in settled.reasons] == ["agent_died"]
    assert (store.nodes(), store.devices()) == ([], [])


def test_an_agent_that_lives_on_this_machine_is_not_disturbed(store: Store, settled: Settled) -> None:
    with subprocess.Popen(["sleep", "60"]) as agent:
        register(store, str(Boot("b00t", Boot.mine().machine, proc_id(agent.pid) or "")))
        with pytest.raises(ConfigurationError, match=rf"serves node n1 and is alive: process {agent.pid} of this"):
            take_over(store, "n1", [NEW], 15.0, settled, unexpected)
        with pytest.raises(ConfigurationError, match=r"serves device GPU-old \(as node n1\)"):
            take_over(store, "n2", [OLD], 15.0, settled, unexpected)
        take_over(store, "n2", [NEW], 15.0, settled, unexpected)
        agent.kill()
    assert [device.state for device in store.devices()] == ["up", "up"]


def test_an_agent_elsewhere_lives_while_it_renews(store: Store, settled: Settled) -> None:
    register(store, ELSEWHERE)
    renewal = threading.Timer(0.5, store.renew, ("n1", ELSEWHERE))
    renewal.start()
    with pytest.raises(ConfigurationError, match=r"agent\.node"):
        take_over(store, "n1", [OLD], 15.0, settled, unexpected)
    renewal.join()


def test_an_agent_elsewhere_that_does_not_renew_is_dead(
    store: Store, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim_services.agent.takeover.WATCH_S", 0.3)
    register(store, ELSEWHERE)
    run_task(store, "10.1")
    take_over(store, "n1", [OLD], 15.0, settled, unexpected)
    assert len(settled.reasons) == 1
    assert store.devices() == []


def test_an_agent_whose_lease_has_run_out_is_dead_at_once(store: Store, settled: Settled) -> None:
    register(store, ELSEWHERE)
    take_over(store, "n1", [OLD], 0.0, settled, unexpected)
    assert store.nodes() == []


def test_the_same_agent_takes_itself_over(store: Store, settled: Settled) -> None:
    register(store, str(Boot.mine()))
    take_over(store, "n1", [OLD], 15.0, settled, unexpected)
    assert store.nodes() == []
