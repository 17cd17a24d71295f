"""The supervisor with real processes: restarts, order, log files, and that nothing outlives it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brim_services.keeper import members
from brim_services.supervise import (
    Backoff,
    ChildDied,
    Command,
    Supervisor,
    termination_requested,
    wait_until,
)

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(60)",
]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)",
]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "logs") as supervisor:
        yield supervisor


def is_up(supervisor: Supervisor, name: str, times: int = 1) -> Callable[[], bool]:
    return lambda: supervisor.children[name].last_lines().count("up") >= times


def test_a_child_runs_in_a_session_of_its_own_with_its_variables_and_log(supervisor: Supervisor) -> None:
    script = "import os; print(os.getsid(0) == os.getpid(), os.environ['A'], os.environ['N'])"

    child = supervisor.start(
        Command("c", [sys.executable, "-c", script], environment={"A": "1"}, variables=lambda: {"N": "2"})
    )

    supervisor_saw = []
    wait_until(lambda: supervisor_saw.extend(supervisor.poll()) or supervisor_saw, 10, "the child ended")
    assert [(death.name, death.code, death.restart_in_s) for death in supervisor_saw] == [("c", 0, None)]
    assert child.last_lines() == "True 1 2"
    assert child.pid is None


def test_a_child_that_is_asked_to_end_does_not_start_again_and_is_told_about(supervisor: Supervisor) -> None:
    supervisor.start(Command("c", SLEEPER, restart=Backoff(first_s=0.01)))
    wait_until(is_up(supervisor, "c"), 10, "the child is up")
    with pytest.raises(ValueError, match="c runs"):
        supervisor.forget("c")

    supervisor.ask_to_end("c")

    deaths = []
    wait_until(lambda: deaths.extend(supervisor.poll()) or deaths, 10, "the child ended")
    assert [(death.code, death.restart_in_s) for death in deaths] == [(-signal.SIGTERM, None)]
    supervisor.forget("c")
    assert supervisor.children == {}
    assert supervisor.poll() == []


def test_a_dead_child_is_started_again_after_a_pause_that_grows(supervisor: Supervisor) -> None:
    numbers = iter(range(10))
    child = supervisor.start(
        Command(
            "c",
            [sys.executable, "-c", "import os; print(os.environ['N'], flush=True); os.abort()"],
            variables=lambda: {"N": str(next(numbers))},
            restart=Backoff(first_s=0.01, longest_s=0.03),
        )
    )

    deaths = []
    wait_until(lambda: deaths.extend(supervisor.poll()) or len(deaths) == 4, 20, "four deaths")

    assert [death.restart_in_s for death in deaths] == [0.01, 0.02, 0.03, 0.03]
    assert "killed by SIGABRT" in str(deaths[0])
    assert child.last_lines().split()[:3] == ["0", "1", "2"]


def test_a_child_that_lived_long_enough_begins_the_back_off_anew(supervisor: Supervisor) -> None:
    supervisor.start(Command("c", [sys.executable, "-c", "pass"], restart=Backoff(first_s=0.01, steady_s=0.0)))

    deaths = []
    wait_until(lambda: deaths.extend(supervisor.poll()) or len(deaths) == 3, 20, "three deaths")

    assert {death.restart_in_s for death in deaths} == {0.01}


def test_stop_kills_the_stubborn_after_their_grace_time(supervisor: Supervisor) -> None:
    supervisor.start(Command("first", SLEEPER))
    supervisor.start(Command("second", STUBBORN, grace_s=0.2))
    for name in ("first", "second"):
        supervisor.wait_until(is_up(supervisor, name), 10, f"{name} is up")
    sessions = [supervisor.children[name].pid or 0 for name in ("first", "second")]

    supervisor.stop("second")
    assert supervisor.children["first"].pid is not None
    supervisor.stop()

    assert members(sessions) == []


def test_stop_does_not_mind_a_child_that_has_just_died(supervisor: Supervisor) -> None:
    child = supervisor.start(Command("c", SLEEPER))
    os.kill(child.pid or 0, signal.SIGKILL)
    wait_until(lambda: members([child.pid or 0]) == [], 10, "it has died")

    supervisor.stop()

    assert child.pid is None


LOGGING_END = [
    sys.executable,
    "-c",
    "import os, signal as s, time; s.signal(s.SIGTERM, lambda *_: exit(open(os.environ['ENDS'], 'a')"
    ".write(os.environ['NAME']) and 0)); print('up', flush=True); time.sleep(60)",
]


def test_stop_ends_higher_stages_first(supervisor: Supervisor, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    for name, stage in (("a", 1), ("b", 0), ("c", 2)):
        environment = {"NAME": name, "ENDS": str(ends)}
        supervisor.start(Command(name, LOGGING_END, environment=environment, stage=stage))
        supervisor.wait_until(is_up(supervisor, name), 10, f"{name} is up")

    supervisor.stop()

    assert ends.read_text() == "cab"


def test_what_a_child_leaves_behind_is_killed_when_it_is_gone(supervisor: Supervisor) -> None:
    child = supervisor.start(Command("c", PARENT))
    supervisor.wait_until(is_up(supervisor, "c"), 10, "c is up")
    session = child.pid or 0
    assert len(members([session])) == 2

    os.kill(session, signal.SIGKILL)
    wait_until(supervisor.poll, 10, "its death was seen")

    assert members([session]) == []


def test_a_wait_ends_when_a_child_dies_instead(supervisor: Supervisor) -> None:
    supervisor.start(Command("c", [sys.executable, "-c", "raise SystemExit('no such GPU')"]))

    with pytest.raises(ChildDied, match=r"c \(pid \d+\) ended: exit code 1\nno such GPU"):
        supervisor.wait_until(lambda: False, 10, "never")


def test_a_wait_ends_even_for_a_child_that_would_be_started_again(supervisor: Supervisor) -> None:
    supervisor.start(Command("c", [sys.executable, "-c", "raise SystemExit('wrong setting')"], restart=Backoff()))

    with pytest.raises(ChildDied, match="wrong setting"):
        supervisor.wait_until(lambda: False, 10, "never")


def test_a_program_that_is_not_there_says_so_in_the_log(supervisor: Supervisor) -> None:
    supervisor.start(Command("c", ["/no/such/program"]))

    with pytest.raises(ChildDied, match="/no/such/program: No such file"):
        supervisor.wait_until(lambda: False, 10, "never")


def test_a_name_can_run_only_once(supervisor: Supervisor) -> None:
    supervisor.start(Command("c", SLEEPER))

    with pytest.raises(ValueError, match="c runs already"):
        supervisor.start(Command("c", SLEEPER))


def test_only_the_thread_that_made_it_may_use_it(supervisor: Supervisor) -> None:
    errors: list[Exception] = []

    def misuse() -> None:
        try:
            supervisor.poll()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=misuse)
    thread.start()
    thread.join()

    assert "belongs to the thread" in str(errors)


def test_a_killed_keeper_is_replaced_and_still_does_its_work(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(Command("c", SLEEPER))
    keeper = supervisor._keeper
    assert keeper
    keeper.kill()
    keeper.wait()

    supervisor.poll()

    assert supervisor._keeper is not keeper
    assert child.pid is not None


OWNER = """
import sys, time
from pathlib import Path
from brim_services.supervise import Command, Supervisor
supervisor = Supervisor(Path(sys.argv[1]))
child = supervisor.start(Command("c", [sys.executable, "-c", sys.argv[2]]))
supervisor.wait_until(lambda: "up" in child.last_lines(), 10, "up")
print(child.pid, supervisor._keeper.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("script", [STUBBORN[2], PARENT[2]], ids=["stubborn", "with a child of its own"])
def test_nothing_outlives_a_killed_supervisor(tmp_path: Path, script: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as owner:
        assert owner.stdout
        session, keeper = map(int, owner.stdout.readline().split())
        assert members([session])

        owner.kill()

    wait_until(lambda: not members([session, keeper]), 10, "all of them are gone")


def test_a_direct_child_dies_with_its_supervisor_even_without_a_keeper(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), STUBBORN[2]],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as owner:
        assert owner.stdout
        session, keeper = map(int, owner.stdout.readline().split())

        os.kill(keeper, signal.SIGKILL)
        owner.kill()

    wait_until(lambda: not members([session]), 10, "the child is gone")


def test_termination_is_noted_instead_of_ending_the_process() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with termination_requested() as requested:
        assert not requested()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(requested, 5, "the signal arrived")

    assert signal.getsignal(signal.SIGTERM) == before


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(TimeoutError, match=r"not within 0\.01 s: rain"):
        wait_until(lambda: False, 0.01, "rain")
