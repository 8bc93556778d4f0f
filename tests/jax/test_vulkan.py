"""A JAX step on a Vulkan device, as the profile of the device and as that of any: no 64-bit integers in the second."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from irongrad.pipeline.bundles import import_bundle
from irongrad.runtime import load
from irongrad.runtime.devices import Device
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan, write_files
from irongrad.runtime.manifest import GOLDEN, read_manifest
from irongrad.runtime.session import initial_state
from irongrad.targets.vulkan import propose


@pytest.fixture(scope="module")
def artifact(bundle: Path, vulkan: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifacts") / "step"
    targets = [propose(vulkan), "vulkan:profile=generic"]
    import_bundle(bundle, directory, targets, entry_points=["train_step"], cache=False)
    return directory


def test_it_is_verified_against_jax_in_float64(artifact: Path, vulkan: Device) -> None:
    for target in read_manifest(artifact).targets:
        assert target.certificate is not None
        assert target.certificate.name == vulkan.name
        assert target.certificate.worst <= 1
        assert any("int64" in flag for flag in target.flags) == (target.name == "vulkan-lavapipe")


def test_it_trains_as_jax_does(artifact: Path, vulkan: Device, recurrent: Any) -> None:
    session, state = load(artifact, device=vulkan.uri), recurrent.state
    assert session.target.name == "vulkan-lavapipe"
    for seed in range(3):
        batch = recurrent.inputs(seed)
        state, loss = recurrent.step(state, **batch, lr=0.2, decay=1e-3)
        assert abs(session.train_step(**batch, lr=0.2) - float(loss)) < 2e-5
    found = session.state()
    np.testing.assert_array_equal(found["key"], jax.random.key_data(state["key"]))
    np.testing.assert_array_equal(found["old_key"], state["old_key"])
    for parameter, value in state["params"].items():
        np.testing.assert_allclose(found[f"params/{parameter}"], value, rtol=0, atol=2e-5)


def test_iree_run_module_agrees_with_jax(
    artifact: Path, iree_run: Callable[[list[str]], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    manifest = read_manifest(artifact)
    plan = make_plan(manifest, read_golden(artifact / GOLDEN), initial_state(artifact), target="vulkan-generic")
    write_files(plan, manifest, tmp_path)
    checks = {c.name.partition(".")[2]: c for c in plan.checks}
    for name in ("train_step", "train_step.from_step_2", "train_step.out_of_range.y"):
        command = [a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in checks[name].command]
        result = iree_run(command)
        assert (result.returncode != 0) == bool(checks[name].refusal), result.stderr + result.stdout
        assert checks[name].refusal in result.stderr
