"""Build the wheel, install it into clean environments, and use everything that it carries.

Run by `make check`. It finds what an editable install hides: a module, script or entry point that the wheel
lacks, a dependency that only the development environment has, an extra that a producer should not need.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "wheel"

LOAD_SCRIPTS = """
import sys
from importlib.resources import files
from pathlib import Path
import redis
from brim.store.runner import Runner, sources
from brim_services import embedded
from brim_services.supervise import Supervisor

assert (files("brim") / "py.typed").is_file(), "the wheel is not typed"
assert sources(), "the wheel holds no Lua script"
with Supervisor(Path(sys.argv[1])) as supervisor:
    server = embedded.start(supervisor, Path(sys.argv[1]) / "data")
    with redis.Redis.from_url(server.url) as client:
        Runner(client).load()
print(f"{len(sources())} scripts load")
"""

IMPORT_ALL = """
import importlib, pkgutil, brim, brim_services
names = [m.name for p in (brim, brim_services) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules import")
"""

# Also what publishing imports only when it is used: the transport of the broker.
USE_AS_PRODUCER = """
import celery, brim
app = celery.Celery("producer", broker="redis://127.0.0.1:1/0")
brim.install(app)
assert app.connection_for_write().transport.driver_type == "redis"
"""

LIST_COMMANDS = """
import typer.main
from brim_services.cli import app

def walk(command, path):
    yield path
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from walk(child, [*path, name])

for path in walk(typer.main.get_command(app), []):
    print(" ".join(path))
"""


def run(*argv: str | Path, **options: str | Path) -> str:
    """The output of a command that must succeed, run outside the repository and without its paths."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in argv],
        cwd=options.get("cwd", WORK),
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, argv))}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(name: str, requirement: str) -> Path:
    """A fresh virtual environment with only ``requirement`` and what it asks for; its python."""
    folder = WORK / name
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--constraint", ROOT / "constraints.txt", requirement)
    return python


def main() -> None:
    """Exits with the failing command's output at the first fault."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", WORK, ROOT)
    [wheel] = WORK.glob("*.whl")
    print(f"built {wheel.name}")

    producer = environment("producer", str(wheel))
    run(producer, "-W", "error", "-c", USE_AS_PRODUCER)
    print("a producer needs no extra")

    full = environment("full", f"{wheel}[worker,server,embedded]")
    print(run(full, "-c", IMPORT_ALL), end="")
    print(run(full, "-c", LOAD_SCRIPTS, WORK / "valkey"), end="")
    commands = run(full, "-c", LIST_COMMANDS).splitlines()
    for command in commands:
        run(full.parent / "brim", *command.split(), "--help")
    print(f"{len(commands)} entry points answer --help")


if __name__ == "__main__":
    main()
