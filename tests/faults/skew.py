"""A node whose clock is wrong: its processes load a small library that shifts the time of day, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SKEW_S = 30
SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc")


def skewed(folder: Path, seconds: int = SKEW_S) -> Mapping[str, str]:
    """The environment of processes whose clock is so many seconds ahead; needs `COMPILER`."""
    library = folder / "skew.so"
    flags = ["-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
    subprocess.run([str(COMPILER), *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SKEW_S": str(seconds)}
