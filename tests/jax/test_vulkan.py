"""A JAX step on a Vulkan device, for the device's own profile and for `generic`, which has no 64-bit integers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from irongrad.frontends.import_bundle import import_bundle
from irongrad.runtime import load
from irongrad.runtime.devices import Device
from irongrad.runtime.golden import key_of, read_golden
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest import GOLDEN
from irongrad.runtime.manifest_file import read_manifest
from irongrad.targets.vulkan import propose


@pytest.fixture(scope="module", params=["generic", pytest.param("lavapipe", marks=pytest.mark.slow)])
def artifact(
    request: pytest.FixtureRequest, bundle: Path, vulkan: Device, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("artifacts") / "step"
    target = propose(vulkan) if request.param == "lavapipe" else "vulkan:profile=generic"
    import_bundle(bundle, directory, target, entry_points=["train_step"], cache=False)
    return directory


def test_the_artifact_is_verified_against_jax_in_float64(artifact: Path, vulkan: Device) -> None:
    (target,) = read_manifest(artifact).targets
    assert target.certificate is not None
    assert target.certificate.name == vulkan.name
    assert target.certificate.worst <= 1
    assert any("int64" in flag for flag in target.flags) == (target.name == "vulkan-lavapipe")


def test_a_session_trains_as_jax_did(artifact: Path, vulkan: Device) -> None:
    """Random keys and counters agree exactly, the rest within the error that is stored with the golden values."""
    session, golden = load(artifact, device=vulkan.uri), read_golden(artifact / GOLDEN)
    for step in range(golden.steps):
        key = key_of("loss", step)
        assert abs(session.train_step(**golden.inputs) - golden.expected[key]) <= golden.allowed[key]
        for tensor, value in session.state().items():
            key = key_of("state", step + 1, tensor)
            assert np.abs(value.astype(np.float64) - golden.expected[key]).max() <= golden.allowed[key]
    assert {golden.allowed[key_of("state", 1, n)] for n in ("key", "old_key", "count")} == {0}


def test_iree_run_module_agrees_with_jax(
    artifact: Path, iree_run: Callable[[list[str]], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    manifest = read_manifest(artifact)
    plan = make_plan(manifest, {"": read_golden(artifact / GOLDEN)}, initial_state(artifact))
    write_files(plan, manifest, tmp_path)
    checks = {c.name.partition(".")[2]: c for c in plan.checks}
    for name in ("train_step", "train_step.from_step_2", "train_step.out_of_range.y"):
        command = [a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in checks[name].command]
        result = iree_run(command)
        assert (result.returncode != 0) == bool(checks[name].refusal), result.stderr + result.stdout
        assert checks[name].refusal in result.stderr
