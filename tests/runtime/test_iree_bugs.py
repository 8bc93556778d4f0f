"""Bugs of IREE 3.13.0 that the artifact's format avoids. A failing test shows that a bug is fixed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import iree.runtime as ireert
import numpy as np
import pytest

import irongrad as ig
from irongrad.cli.compile import load_step
from irongrad.runtime.commands import run_module
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest_file import read_manifest

STARTS = 80
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def failures(command: list[str]) -> int:
    runs = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(STARTS))
    return sum("transient buffer has not been committed" in r.stderr for r in runs)


def in_file_mode(command: list[str]) -> list[str]:
    return [a for a in command if not a.startswith("--parameter_mode")]


def exporting(artifact: Path, state: Path | None = None) -> list[str]:
    return run_module(read_manifest(artifact), artifact, "export_state", state=state, device="local-task")


@pytest.fixture(scope="module")
def digits_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's artifact; its state is large enough for the race to happen often."""
    directory = tmp_path_factory.mktemp("artifacts") / "digits"
    ig.compile(load_step(f"{EXAMPLES / 'digits.py'}:make_step"), directory)
    return directory


@pytest.mark.slow
def test_splat_parameters_still_race_on_local_task(digits_artifact, tmp_path):
    """When this fails, `irongrad.pipeline.package.write_state` can write repeated values as splats."""
    index = ireert.ParameterIndex()
    for name, array in initial_state(digits_artifact).items():
        data = array.tobytes()
        if array.size > 1 and not array.any():
            index.add_splat(name, np.zeros(1, np.uint8), len(data))
        else:
            index.add_buffer(name, np.frombuffer(data, np.uint8))
    index.create_archive_file(str(tmp_path / "splats.irpa"))
    command = exporting(digits_artifact, state=tmp_path / "splats.irpa")
    assert failures(in_file_mode(command)) > 0


@pytest.mark.slow
def test_the_written_state_starts_every_time(digits_artifact):
    command = exporting(digits_artifact)
    assert failures(command) == 0
    assert failures(in_file_mode(command)) == 0
