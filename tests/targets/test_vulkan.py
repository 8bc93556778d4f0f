"""Training on a Vulkan device: verified, interchangeable with the CPU, and refused where it would be wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import iree.runtime as ireert
import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.driver import build, make_options
from irongrad.runtime import load
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import ArtifactError, VerificationError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan, write_files
from irongrad.runtime.manifest import GOLDEN, read_manifest
from irongrad.runtime.session import initial_state
from irongrad.targets import parse_target
from irongrad.targets.vulkan import propose


def iree_run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    tool = shutil.which(arguments[0]) or str(Path(sys.executable).with_name(arguments[0]))
    return subprocess.run([tool, *arguments[1:]], capture_output=True, text=True, check=False)


def test_digits_are_verified_on_both_devices(digits, vulkan):
    cpu, gpu = read_manifest(digits).targets
    assert cpu.certificate is not None
    assert gpu.certificate is not None
    assert (gpu.certificate.name, gpu.certificate.driver) == (vulkan.name, vulkan.driver)
    assert gpu.certificate.worst <= 1


def test_the_device_picks_the_target(digits, vulkan):
    assert load(digits).target.name == "llvm-cpu"
    assert load(digits, device="local-sync").target.name == "llvm-cpu"
    session = load(digits, device=vulkan.uri)
    assert session.target.name == propose(vulkan).replace(":profile=", "-").replace(",subgroup=", "-")
    with pytest.raises(ArtifactError, match="no target for the device 'cuda'; it has llvm-cpu, vulkan-"):
        load(digits, device="cuda")


@pytest.mark.parametrize(("first", "second"), [("local-task", "vulkan"), ("vulkan", "local-task")])
def test_a_checkpoint_moves_between_devices(digits, tmp_path, first, second):
    inputs = read_golden(digits / GOLDEN).inputs
    start = load(digits, device=first)
    for _ in range(3):
        start.train_step(**inputs)
    start.save(tmp_path / "state.safetensors")
    there = load(digits, device=second, checkpoint=tmp_path / "state.safetensors")
    before, after = start.state(), there.state()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert there.eval_step(**inputs) == pytest.approx(start.eval_step(**inputs), rel=1e-5)
    for _ in range(3):
        assert there.train_step(**inputs) == pytest.approx(start.train_step(**inputs), rel=1e-3)


def test_iree_run_module_agrees_with_the_oracle(digits, tmp_path):
    manifest, golden = read_manifest(digits), read_golden(digits / GOLDEN)
    plan = make_plan(manifest, golden, initial_state(digits), target=manifest.targets[1].name)
    write_files(plan, manifest, tmp_path)
    checks = {c.name.partition(".")[2]: c for c in plan.checks}
    for name in ("train_step", "eval_step", "train_step.out_of_range.y"):
        check = checks[name]
        command = [a.replace(ARTIFACT, str(digits)).replace(FILES, str(tmp_path)) for a in check.command]
        result = iree_run(command)
        assert (result.returncode != 0) == bool(check.refusal), result.stderr + result.stdout
        assert check.refusal in result.stderr


class Attention(nn.Module):
    """Token embeddings, one causal attention with a normalisation before it, and logits."""

    def __init__(self, tokens: int = 16, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(self.embed(x))).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def make_gpt() -> ig.TrainStep:
    torch.manual_seed(0)
    model = Attention()
    return ig.TrainStep(
        model=model,
        loss=lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs={"x": torch.randint(0, 16, (2, 8)), "y": torch.randint(0, 16, (2, 8))},
    )


def test_a_small_gpt_is_verified(vulkan, tmp_path):
    artifact = ig.compile(make_gpt(), tmp_path / "gpt", propose(vulkan), entry_points=["train_step"])
    (target,) = artifact.manifest.targets
    assert target.certificate is not None
    assert target.certificate.name == vulkan.name


def make_wide_sum() -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 1))
    return ig.TrainStep(
        model=model,
        loss=lambda y: y.square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        inputs={"x": torch.randn(4, 512)},
    )


def test_another_subgroup_size_is_refused_when_it_is_loaded(vulkan, tmp_path):
    size = 2 * vulkan.subgroup[0]
    text = f"vulkan:profile=lavapipe,subgroup={size}"
    artifact = ig.compile(make_wide_sum(), tmp_path / "sum", text, entry_points=["train_step"])
    (target,) = artifact.manifest.targets
    assert target.certificate is None
    with pytest.raises(ArtifactError, match=f"subgroups of {size} lanes, and those of .* have {vulkan.subgroup[0]}"):
        artifact.load()
    result = iree_run(run_module(artifact.manifest, artifact.directory, "train_step"))
    assert result.returncode != 0
    assert f"this module is compiled for Vulkan devices whose subgroups have {size} lanes" in result.stderr


def test_without_the_check_the_numbers_are_wrong(vulkan, tmp_path):
    """When this fails, IREE asks for the subgroup size itself, and the checks of `irongrad.targets.vulkan` can go."""
    target = parse_target(f"vulkan:profile=lavapipe,subgroup={4 * vulkan.subgroup[0]}")
    options = make_options(tmp_path / "wrong", entry_points=["train_step"])
    unchecked = replace(options, targets=(replace(target, requirements=(), subgroup=0),))
    with pytest.raises(VerificationError, match="disagrees with eager float64"):
        build(make_wide_sum(), unchecked)


def test_device_arrays_still_cannot_be_read(vulkan):
    """When this fails, `irongrad.runtime.transfer` can be `DeviceArray.to_host`."""
    device = ireert.get_device(vulkan.uri)
    array = ireert.asdevicearray(device, np.arange(5, dtype=np.float32))
    with pytest.raises(ValueError, match="minImportedHostPointerAlignment"):
        array.to_host()
