"""Start ranks on this machine for a benchmark; it is imported by scaling.py, plan.py and sync_curves.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def results(count: int, program: str, options: Mapping[str, object]) -> list[Any]:
    """Run a program on so many ranks; return what each of them prints as a line of JSON.

    Args:
        count: the number of ranks.
        program: the path of the program.
        options: its options and their values; True for an option without a value.
    """
    command = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "--bind-to", "none", "-n", str(count)]
    command += [sys.executable, program]
    for name, value in options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if not found:
        raise SystemExit(done.stdout + done.stderr)
    return found
