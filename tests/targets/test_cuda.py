"""PTX of training steps, assembled by CUDA's ptxas for every compute capability; no GPU is needed."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.compile import COMMON_FLAGS, _iree_compile
from irongrad.pipeline.driver import build, make_options
from irongrad.runtime import load, selection
from irongrad.runtime.devices import devices_of
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import read_manifest
from irongrad.targets import parse_target
from irongrad.targets.cuda import KNOWN, find_ptxas

ARCHITECTURES = [*KNOWN, "sm_90"]


class Network(nn.Module):
    """A convolution, a normalisation, an attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(self.convolution(x).transpose(1, 2))
        return self.head(nn.functional.scaled_dot_product_attention(z, z, z)).mean(1)


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = Network()
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs={"x": torch.randn(4, 4, 16), "y": torch.randint(0, 4, (4,))},
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    """One training step for every architecture, with its PTX in the folder `ptx.<architecture>` beside it."""
    folder = tmp_path_factory.mktemp("cuda")
    options = make_options(folder / "step", [f"cuda:arch={a}" for a in ARCHITECTURES], entry_points=["train_step"])
    dumping = [
        replace(t, flags=(*t.flags, f"--iree-hal-dump-executable-binaries-to={folder / f'ptx.{a}'}"))
        for t, a in zip(options.targets, ARCHITECTURES, strict=True)
    ]
    build(make_step(), replace(options, targets=tuple(dumping)))
    return folder / "step"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ptxas_assembles_every_kernel(artifact, architecture):
    tool = find_ptxas()
    assert tool is not None, "install the extra 'test': it has CUDA's assembler"
    (ptx,) = artifact.with_name(f"ptx.{architecture}").iterdir()
    assert f".target {architecture}\n" in ptx.read_text()
    command = [tool, f"--gpu-name={architecture}", "--verbose", str(ptx), "-o", "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("Compiling entry function") == ptx.read_text().count(".visible .entry") > 30


def test_a_step_that_never_ran_is_not_verified(artifact, monkeypatch):
    certificates = {t.certificate is None for t in read_manifest(artifact).targets}
    assert certificates == {not devices_of("cuda")}
    monkeypatch.setattr(selection, "find_device", lambda uri: None)
    with pytest.raises(ArtifactError, match="no CUDA device was found"):
        load(artifact, target="cuda-sm_90")


def test_iree_still_does_not_know_sm_90(tmp_path):
    """When this fails, `irongrad.targets.cuda` can name sm_90 as it does the others."""
    source = tmp_path / "probe.mlir"
    source.write_text(
        "func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %y = arith.addf %x, %x : tensor<4xf32>\n  return %y : tensor<4xf32>\n}\n"
    )
    named = [*COMMON_FLAGS, "--iree-hal-target-device=cuda", "--iree-cuda-target=sm_90"]
    result = _iree_compile([*named, "--compile-to=hal", str(source), "-o", str(tmp_path / "out")])
    assert result.returncode != 0
    assert "missing GPU target" in result.stderr
    assert parse_target("cuda:arch=sm_90").flags != parse_target("cuda:arch=sm_89").flags
