"""An artifact for two targets, a CPU and a Vulkan device."""

from __future__ import annotations

from pathlib import Path

import pytest

import irongrad as ig
from irongrad.cli.compile import load_step
from irongrad.runtime.devices import Device
from irongrad.targets.vulkan import propose

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def digits(vulkan: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits CNN for this machine's CPU and its Vulkan device."""
    directory = tmp_path_factory.mktemp("artifacts") / "digits"
    step = load_step(f"{EXAMPLES / 'digits.py'}:make_step")
    entry_points = ("train_step", "eval_step", "export_state", "import_state")
    ig.compile(step, directory, ["llvm-cpu", propose(vulkan)], entry_points=entry_points)
    return directory
