from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save

from irongrad.cli.main import cli
from irongrad.frontends.import_bundle import import_bundle
from irongrad.jax import export_step
from irongrad.jax.bundle import read_bundle, write_bundle
from irongrad.runtime import load
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import GuardError, ToolchainError, UserError, VerificationError
from irongrad.runtime.golden import read_golden


def sgd(state: Any, x: Any) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(lambda w: jax.numpy.mean((x @ w) ** 2))(state)
    return state - 0.1 * gradient, loss


@pytest.fixture(scope="session")
def artifact(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, imported by the command line."""
    directory = tmp_path_factory.mktemp("artifacts") / "step"
    result = CliRunner().invoke(cli, ["import", str(bundle), "-o", str(directory), "--no-cache", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["targets"]["llvm-cpu"] <= 1
    return directory


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundles") / "small.jax"
    export_step(sgd, np.ones((3, 2), np.float32), {"x": np.ones((4, 3), np.float32)}, directory)
    return directory


def test_an_imported_step_has_the_entry_points_that_it_can_have(artifact: Path) -> None:
    manifest = load(artifact).manifest
    names = [e.name for e in manifest.entry_points]
    training, state = ["train_step", "train_steps", "train_and_export"], ["export_state", "import_state", "reset"]
    assert names == [*training, "eval_step", "predict", *state]
    assert {h.name: h.default for h in manifest.hypers} == {"lr": 0.5, "decay": 1e-3}
    assert manifest.route == "stablehlo"
    assert manifest.versions["jax"] == jax.__version__


def test_an_imported_step_trains_as_jax_does(artifact: Path, recurrent: Any) -> None:
    """Ten batches at several learning rates: keys and counters agree exactly, the rest up to float32 rounding."""
    session, state = load(artifact), recurrent.state
    for seed in range(10):
        batch, lr = recurrent.inputs(seed), 0.1 * (seed % 3)
        state, loss = recurrent.step(state, **batch, lr=lr, decay=1e-3)
        assert abs(session.train_step(**batch, lr=lr) - float(loss)) < 2e-5
    found = session.state()
    assert found["irongrad/steps"] == 10
    assert found["count"] == 10
    assert bool(found["warm"])
    np.testing.assert_array_equal(found["key"], jax.random.key_data(state["key"]))
    np.testing.assert_array_equal(found["old_key"], state["old_key"])
    for name, value in state["params"].items():
        np.testing.assert_allclose(found[f"params/{name}"], value, rtol=0, atol=2e-5)


def test_train_steps_takes_the_same_steps_as_train_step(artifact: Path, recurrent: Any) -> None:
    one, many = load(artifact), load(artifact)
    batches = [recurrent.inputs(seed) for seed in range(3)]
    losses = [one.train_step(**b, lr=0.1) for b in batches]
    stacked = {n: np.stack([b[n] for b in batches]) for n in batches[0]}
    np.testing.assert_array_equal(many.train_steps(**stacked, lr=0.1), np.float32(losses))
    for name, value in one.state().items():
        np.testing.assert_array_equal(many.state()[name], value)


def test_a_checkpoint_restores_bfloat16_and_random_keys_too(artifact: Path, recurrent: Any, tmp_path: Path) -> None:
    session, batch = load(artifact), recurrent.inputs(1)
    session.train_step(**batch)
    session.save(tmp_path / "a.safetensors")
    losses = [session.train_step(**batch) for _ in range(2)]
    session.restore(tmp_path / "a.safetensors")
    assert [session.train_step(**batch) for _ in range(2)] == losses
    again = load(artifact, checkpoint=tmp_path / "a.safetensors")
    assert [again.train_step(**batch) for _ in range(2)] == losses
    session.reset()
    assert session.state()["count"] == 0


def test_inputs_out_of_range_or_of_a_wrong_shape_are_refused(artifact: Path, recurrent: Any) -> None:
    session, batch = load(artifact), recurrent.inputs(0)
    before = session.state()
    with pytest.raises(GuardError, match=r"y: every value must be in \[0, 2\]; the step was not run"):
        session.train_step(**{**batch, "y": np.full(5, 3, np.int32)})
    with pytest.raises(GuardError, match="x shape dimension 0 mismatch"):
        session.train_step(**{**batch, "x": np.ones((6, 3, 4), np.float32)})
    assert all((before[n] == a).all() for n, a in session.state().items())


def test_an_imported_step_runs_without_python(artifact: Path, tmp_path: Path) -> None:
    session = load(artifact)
    found = read_golden(artifact / "golden.safetensors").inputs
    files = {}
    for name, array in found.items():
        files[name] = tmp_path / f"{name}.bin"
        array.tofile(files[name])
    command = run_module(session.manifest, artifact, "train_step", inputs=files)
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = float(result.stdout.rsplit("f32=", 1)[1].split()[0])
    assert abs(printed - session.train_step(**found)) < 1e-5


def test_wrong_numbers_are_refused(small: Path, tmp_path: Path) -> None:
    bundle = read_bundle(small)
    expected = {k: v * (1 + 1e-3) if k == "loss/1/" else v for k, v in bundle.golden.expected.items()}
    write_bundle(replace(bundle, golden=replace(bundle.golden, expected=expected)), tmp_path / "wrong")
    with pytest.raises(VerificationError, match="loss/1/"):
        import_bundle(tmp_path / "wrong", tmp_path / "out", cache=False)
    assert not (tmp_path / "out").exists()


def test_a_module_that_iree_cannot_read_is_named(small: Path, tmp_path: Path) -> None:
    bundle = read_bundle(small)
    newer = bundle.modules["step"].replace(b"vhlo", b"vhlx")
    write_bundle(replace(bundle, modules={"step": newer}), tmp_path / "newer")
    with pytest.raises(ToolchainError, match=f"The step is StableHLO {bundle.index.stablehlo} of jax"):
        import_bundle(tmp_path / "newer", tmp_path / "out", cache=False)


def test_a_bundle_without_a_part_of_its_state_is_refused(small: Path, tmp_path: Path) -> None:
    bundle = read_bundle(small)
    (tmp_path / "b").mkdir()
    write_bundle(bundle, tmp_path / "b")
    (tmp_path / "b" / "state.safetensors").write_bytes(save({"other": np.ones(1, np.float32)}))
    with pytest.raises(UserError, match=r"state\.safetensors lacks state"):
        read_bundle(tmp_path / "b")


def test_a_directory_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["import", str(tmp_path), "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError)
    assert "is neither an .onnx file nor a bundle" in str(result.exception)
