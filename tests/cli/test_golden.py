"""`irongrad golden`: every check passes on a right artifact and fails on wrong values."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import irongrad as ig
from irongrad.cli.golden import command
from irongrad.runtime import cpu
from irongrad.runtime.errors import ArtifactError, UserError, VerificationError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_ctest import ctest_script, write_files
from irongrad.runtime.golden_plan import make_plan
from irongrad.runtime.golden_whole import whole_golden
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest import GOLDEN
from irongrad.runtime.manifest_file import read_manifest


def iree_run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    tool = shutil.which(arguments[0]) or str(Path(sys.executable).with_name(arguments[0]))
    return subprocess.run([tool, *arguments[1:]], capture_output=True, text=True, check=False, timeout=60)


def ctest(directory: Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("ctest")
    if tool is None:
        import cmake

        tool = str(Path(cmake.CMAKE_BIN_DIR) / "ctest")
    return subprocess.run([tool, "--test-dir", str(directory)], capture_output=True, text=True, check=False)


def unpack(artifact: Path, output: Path, *options: str) -> dict[str, dict]:
    result = CliRunner().invoke(command, [str(artifact), "-o", str(output), "--json", *options], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert all((output / name).is_file() for name in report["files"])
    return {check["name"].removeprefix("llvm-cpu."): check for check in report["checks"]}


def agrees(check: dict) -> bool:
    result = iree_run(check["command"])
    if check["refusal"]:
        return result.returncode != 0 and check["refusal"] in result.stderr
    return result.returncode == 0


def test_every_check_passes(mlp_artifact, tmp_path):
    checks = unpack(mlp_artifact, tmp_path)
    assert {c.partition(".")[0] for c in checks} == {e.name for e in read_manifest(mlp_artifact).entry_points}
    assert {"train_step.from_step_1", "train_step.from_step_2", "train_steps.out_of_range.y"} <= checks.keys()
    assert "predict.wrong_shape.x" in checks
    assert [name for name, check in checks.items() if not agrees(check)] == []


def test_every_check_of_a_large_step_has_the_inputs_and_the_learning_rate_of_its_own_step(tmp_path, monkeypatch):
    for module in ("chosen_steps", "steps_at_rest", "oracle"):
        monkeypatch.setattr(f"irongrad.pipeline.oracle.{module}.LARGE", 10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    inputs = {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}
    step = ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), inputs)
    ig.compile(step, tmp_path / "out", entry_points=("train_step", "train_steps", "export_state"), cache=False)
    checks = unpack(tmp_path / "out", tmp_path / "golden")
    assert "--input=0.0" in checks["train_step"]["command"]
    assert "--input=0.001" in checks["train_step.from_step_1"]["command"]
    assert "--input=2xf64=0.0 0.001" in checks["train_steps"]["command"]
    assert [name for name, check in checks.items() if not agrees(check)] == []


@pytest.mark.parametrize(
    "name",
    [
        "train_step",
        "train_step.from_step_1",
        "train_step.from_step_2",
        "train_steps",
        "grad_step",
        "eval_step",
        "predict",
        "export_state",
    ],
)
def test_a_wrong_value_fails(name, mlp_artifact, tmp_path):
    check = unpack(mlp_artifact, tmp_path)[name]
    flag = next(a for a in check["command"] if a.startswith("--expected_output=@"))
    path = Path(flag.partition("@")[2])
    value = np.load(path)
    value.reshape(-1)[-1] += np.float32(1e-3)
    np.save(path, value)
    result = iree_run(check["command"])
    assert result.returncode != 0
    assert "[FAILED]" in result.stdout


def test_a_later_step_needs_its_own_state(mlp_artifact, tmp_path):
    checks = unpack(mlp_artifact, tmp_path)
    first, second = (checks[f"train_step.from_step_{k}"]["command"] for k in (1, 2))
    swapped = [a.replace("state.1.", "state.2.") for a in first]
    assert swapped != first
    assert iree_run(swapped).returncode != 0
    assert iree_run(second).returncode == 0


def test_a_missing_guard_is_noticed(mlp_artifact, tmp_path):
    check = unpack(mlp_artifact, tmp_path)["train_step.out_of_range.y"]
    assert not agrees({**check, "command": [a.replace("6xi64=4", "6xi64=3") for a in check["command"]]})


def test_the_directory_runs_alone_and_elsewhere(mlp_artifact, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    shutil.copytree(mlp_artifact, tmp_path / "here" / "mlp")
    unpack(tmp_path / "here" / "mlp", tmp_path / "here" / "golden")
    (tmp_path / "here").rename(tmp_path / "there")
    result = ctest(tmp_path / "there" / "golden")
    assert result.returncode == 0, result.stdout
    assert "mlp.llvm-cpu.train_step.from_step_2" in result.stdout


class Mixed(nn.Module):
    """State, inputs and outputs with dtypes that .npy files or iree-run-module treat specially."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("keep", torch.tensor([True, False, True, True]))
        self.register_buffer("table", torch.arange(4, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = (x + half.float() * self.scale.float()) * mask * self.keep + self.table.float()
        out = self.linear(z)
        return out, out.argmax(-1), out > 0, out.to(torch.bfloat16)


def test_checks_pass_for_every_dtype(tmp_path):
    torch.manual_seed(0)
    model = Mixed()
    step = ig.TrainStep(
        model=model,
        loss=lambda outputs, y: nn.functional.cross_entropy(outputs[0], y),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={
            "x": torch.randn(2, 4),
            "mask": torch.tensor([[True, False, True, True]] * 2),
            "half": torch.randn(2, 4).half(),
            "y": torch.tensor([0, 2], dtype=torch.int64),
        },
    )
    entry_points = ["train_step", "predict", "export_state", "import_state"]
    ig.compile(step, tmp_path / "mixed", entry_points=entry_points)
    checks = unpack(tmp_path / "mixed", tmp_path / "golden")
    assert {f"predict.output{i}" for i in range(4)} <= checks.keys()
    assert [name for name, check in checks.items() if not agrees(check)] == []


@pytest.fixture(scope="module")
def large_artifact(tmp_path_factory) -> Path:
    """An artifact with a weight and an output so large that the golden values hold only samples of them."""
    torch.manual_seed(0)
    model = nn.Linear(8, 640)
    step = ig.TrainStep(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(7, 8), "y": torch.randn(7, 640)},
    )
    directory = tmp_path_factory.mktemp("artifacts") / "large"
    return ig.compile(step, directory, entry_points=["train_step", "predict", "export_state"]).directory


def test_large_tensors_are_checked_whole(large_artifact, tmp_path):
    checks = unpack(large_artifact, tmp_path)
    assert {"train_step.from_step_2", "predict"} <= checks.keys()
    assert [name for name, check in checks.items() if not agrees(check)] == []
    (path,) = tmp_path.glob("expected/predict/*.npy")
    value = np.load(path)
    assert value.shape == (7, 640)
    value[3, 4] += np.float32(1e-3)
    np.save(path, value)
    assert not agrees(checks["predict"])


def test_large_tensors_are_left_out_where_the_artifact_cannot_run(large_artifact, tmp_path, monkeypatch):
    manifest = read_manifest(large_artifact)
    monkeypatch.setattr(cpu.platform, "machine", lambda: "s390x")
    golden, reason = whole_golden(large_artifact, manifest, read_golden(large_artifact / GOLDEN))
    assert "this machine is s390x" in reason
    plan = make_plan(manifest, {"": golden}, initial_state(large_artifact))
    assert not plan.states
    assert {c.name for c in plan.checks} >= {"llvm-cpu.train_step", "llvm-cpu.predict"}
    result = CliRunner().invoke(command, [str(large_artifact), "-o", str(tmp_path)], catch_exceptions=False)
    assert "large tensors are not checked" in result.stderr


def test_a_run_that_disagrees_with_a_sample_is_refused(large_artifact):
    golden = read_golden(large_artifact / GOLDEN)
    wrong = {k: v + (k == "state/2/weight") * 1e-2 for k, v in golden.expected.items()}
    with pytest.raises(VerificationError, match="is wrong here: state/2/weight is off by 0.01"):
        whole_golden(large_artifact, read_manifest(large_artifact), replace(golden, expected=wrong))


def test_an_unverified_target_is_skipped_where_its_device_is_missing(mlp_artifact, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    manifest = read_manifest(mlp_artifact)
    golden, initial = read_golden(mlp_artifact / GOLDEN), initial_state(mlp_artifact)
    for certificate, word in ((manifest.targets[0].certificate, "Failed"), (None, "Skipped")):
        target = replace(manifest.targets[0], certificate=certificate)
        plan = make_plan(replace(manifest, targets=(target,)), {"": golden}, initial, device="no-such-device")
        write_files(plan, manifest, tmp_path)
        (tmp_path / "CTestTestfile.cmake").write_text(ctest_script(plan, mlp_artifact, ""))
        assert f"llvm-cpu.predict ({word})" in ctest(tmp_path).stdout


def test_an_unknown_target_and_a_foreign_directory_are_refused(mlp_artifact, tmp_path):
    with pytest.raises(UserError, match="no target 'cuda'; it has llvm-cpu"):
        unpack(mlp_artifact, tmp_path, "--target", "cuda")
    with pytest.raises(ArtifactError, match="not an IronGrad artifact"):
        unpack(tmp_path, tmp_path)


def test_the_golden_command_imports_no_compiler():
    code = "import irongrad.cli.golden, sys; print([n for n in ('torch', 'iree.compiler') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
