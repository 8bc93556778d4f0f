"""PTX of training steps, assembled by CUDA's ptxas for every compute capability; no GPU is needed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.mlir.tools import run_tool
from irongrad.pipeline.driver import build
from irongrad.pipeline.iree.compile import COMMON_FLAGS
from irongrad.pipeline.options import make_options
from irongrad.runtime import load, selection
from irongrad.runtime.devices import devices_of
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest_file import read_manifest
from irongrad.targets import parse_target
from irongrad.targets.cuda import ARCHITECTURES, find_ptxas


class Network(nn.Module):
    """A convolution, a normalisation, an attention and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(self.convolution(x).transpose(1, 2))
        return self.head(nn.functional.scaled_dot_product_attention(z, z, z)).mean(1)


def make_step(width: int = 8, precision: str = "f32") -> ig.TrainStep:
    torch.manual_seed(0)
    model = Network(width)
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs={"x": torch.randn(4, 4, 16), "y": torch.randint(0, 16, (4,))},
        precision=precision,
    )


def compiled(step: ig.TrainStep, folder: Path, architectures: Iterable[str]) -> Path:
    """Compile `step` for these architectures; the folders `ptx.<architecture>` beside the artifact get its PTX."""
    options = make_options(folder / "step", [f"cuda:arch={a}" for a in architectures], entry_points=["train_step"])
    dumping = [
        replace(t, flags=(*t.flags, f"--iree-hal-dump-executable-binaries-to={folder / f'ptx.{a}'}"))
        for t, a in zip(options.targets, architectures, strict=True)
    ]
    build(step, replace(options, targets=tuple(dumping)))
    return folder / "step"


def kernels(ptx: str) -> dict[str, str]:
    """The code of each kernel, by name."""
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def assemble(ptx: Path, architecture: str) -> subprocess.CompletedProcess[str]:
    tool = find_ptxas()
    assert tool is not None, "install the extra 'test': it has CUDA's assembler"
    command = [tool, f"--gpu-name={architecture}", "--verbose", str(ptx), "-o", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# The default run assembles for the oldest architecture, which lacks products, and for the latest, which IREE lacks.
DEFAULT = ("sm_70", "sm_90")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return compiled(make_step(), tmp_path_factory.mktemp("cuda"), DEFAULT)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    return compiled(make_step(), tmp_path_factory.mktemp("others"), [a for a in ARCHITECTURES if a not in DEFAULT])


@pytest.mark.parametrize("architecture", DEFAULT)
def test_ptxas_assembles_every_kernel(artifact, architecture):
    check_kernels(artifact, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in DEFAULT])
def test_ptxas_assembles_every_kernel_of_the_others(others, architecture):
    check_kernels(others, architecture)


def check_kernels(artifact: Path, architecture: str) -> None:
    (ptx,) = artifact.with_name(f"ptx.{architecture}").iterdir()
    assert f".target {architecture}\n" in ptx.read_text()
    result = assemble(ptx, architecture)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("Compiling entry function") == ptx.read_text().count(".visible .entry") > 30


def test_a_step_that_never_ran_is_not_verified(artifact, monkeypatch):
    certificates = {t.certificate is None for t in read_manifest(artifact).targets}
    assert certificates == {not devices_of("cuda")}
    monkeypatch.setattr(selection, "find_device", lambda uri: None)
    with pytest.raises(ArtifactError, match="no CUDA device was found"):
        load(artifact, target="cuda-sm_90")


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory) -> Path:
    return compiled(make_step(32, "bf16"), tmp_path_factory.mktemp("bfloat16"), ["sm_80", "sm_90"])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_tensor_cores_multiply_bfloat16_matrices(bfloat16, architecture):
    (ptx,) = bfloat16.with_name(f"ptx.{architecture}").iterdir()
    assert assemble(ptx, architecture).returncode == 0
    products = {n: code for n, code in kernels(ptx.read_text()).items() if n.endswith("bf16xbf16xf32")}
    # These are the last layer, its two gradients, the attention scores, and the gradient of the probabilities.
    sizes = {n.partition("matmul_")[2].removesuffix("_bf16xbf16xf32") for n in products}
    assert sizes == {"64x16x32", "16x32x64", "64x32x16", "4x16x16x32"}
    assert len(products) == 5
    assert [n for n, code in products.items() if "mma.sync" not in code] == []


MATMUL = """
func.func @product(%a: tensor<64x64xTYPE>, %b: tensor<64x64xTYPE>) -> tensor<64x64xf32> {
  %empty = tensor.empty() : tensor<64x64xf32>
  %zero = arith.constant 0.0 : f32
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
  %c = linalg.matmul ins(%a, %b : tensor<64x64xTYPE>, tensor<64x64xTYPE>)
      outs(%zeros : tensor<64x64xf32>) -> tensor<64x64xf32>
  return %c : tensor<64x64xf32>
}
"""


def product(dtype: str, flags: Sequence[str], folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """Compile one matrix product; return the compiler's result and the PTX."""
    source = folder / "product.mlir"
    source.write_text(MATMUL.replace("TYPE", dtype))
    dump = f"--iree-hal-dump-executable-binaries-to={folder / 'ptx'}"
    result = run_tool("iree-compile", [*COMMON_FLAGS, *flags, dump, str(source), "-o", "/dev/null"])
    return result, "".join(p.read_text() for p in folder.glob("ptx/*"))


@pytest.mark.parametrize(("dtype", "used"), [("f16", True), ("bf16", True), ("f32", False)])
def test_tensor_cores_compute_only_16_bit_products(dtype, used, tmp_path):
    """When this fails for f32, IREE supports TF32; then update `irongrad.targets.cuda` and docs/targets.md."""
    result, ptx = product(dtype, parse_target("cuda:arch=sm_80").flags, tmp_path)
    assert result.returncode == 0, result.stderr
    assert ("mma.sync" in ptx) == used


def test_iree_still_gives_older_gpus_products_that_they_lack(tmp_path):
    """When this fails, the quirk of sm_70 and sm_75 in `irongrad.targets.cuda` can be removed."""
    named = ["--iree-hal-target-device=cuda", "--iree-cuda-target=sm_75"]
    result, _ = product("f16", named, tmp_path)
    assert result.returncode != 0
    assert "Cannot select: intrinsic %llvm.nvvm.mma.m16n8k16" in result.stderr
    result, ptx = product("f16", parse_target("cuda:arch=sm_75").flags, tmp_path)
    assert result.returncode == 0, result.stderr
    assert ptx


def test_iree_still_does_not_know_sm_90(tmp_path):
    """When this fails, `irongrad.targets.cuda` can name sm_90 like the other architectures."""
    source = tmp_path / "probe.mlir"
    source.write_text(
        "func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %y = arith.addf %x, %x : tensor<4xf32>\n  return %y : tensor<4xf32>\n}\n"
    )
    named = [*COMMON_FLAGS, "--iree-hal-target-device=cuda", "--iree-cuda-target=sm_90"]
    result = run_tool("iree-compile", [*named, "--compile-to=hal", str(source), "-o", str(tmp_path / "out")])
    assert result.returncode != 0
    assert "missing GPU target" in result.stderr
    assert parse_target("cuda:arch=sm_90").flags != parse_target("cuda:arch=sm_89").flags
