"""Lookups in slices with gaps, such as columns; slices of any size beside a reduction; parts of widened numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.passes.module.keep_slices_apart import KeepSlicesApart
from irongrad.pipeline.iree.tools import compile_file
from irongrad.runtime.errors import ToolchainError
from tests.fixtures.processors import needs_x86

_AVX2 = "llvm-cpu:cpu=x86-64-v3"

INDEX = torch.tensor([1, 0, 3, 2])

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned column": lambda x, i: x[..., 1].flip(0) + i.sum(),
    "gathered column": lambda x, i: x[..., 0].gather(0, i.unsqueeze(1).expand(4, 4)),
    "every second row": lambda x, i: x[:, 0, 0][::2][i],
    "every second element": lambda x, i: x.flatten()[::2][i],
    "columns backwards": lambda x, i: x[..., 1:].flip(1) * i[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lookups_in_slices_with_gaps_equal_eager(name: str) -> None:
    """compile_function compares with eager float64."""
    x = torch.randn(8, 4, 2, generator=torch.Generator().manual_seed(0))
    ig.compile_function(FUNCTIONS[name], (x, INDEX))


def test_iree_still_has_no_code_for_lookups_in_slices_with_gaps(without: Callable[[type], None]) -> None:
    """When this fails, the pass is no longer needed."""
    without(KeepSlicesApart)
    with pytest.raises(ToolchainError, match="unrealized_conversion_cast"):
        ig.compile_function(lambda x: x[..., 1].flip(0), (torch.randn(6, 5, 4),))


_SIZES = {"x": {0: "B", 1: "T"}, "y": {0: "B"}}


class _LastAndMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.tanh(self.first(x.transpose(0, 1)))
        return self.second(steps[-1] + steps.mean(0))


def _last_and_mean(*dimensions: str) -> ig.TrainStep:
    torch.manual_seed(0)
    model = _LastAndMean()
    return ig.TrainStep(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(4, 5, 3), "y": torch.randn(4, 2)},
        dynamic={n: {d: x for d, x in sizes.items() if x in dimensions} for n, sizes in _SIZES.items()},
    )


@pytest.mark.parametrize("dimensions", ["BT", "T"])
def test_the_last_step_beside_the_mean_of_all_trains_at_every_size(dimensions: str, tmp_path: Path) -> None:
    """A slice of a fixed size, too, if its place is not known."""
    session = ig.compile(_last_and_mean(*dimensions), tmp_path, entry_points=["train_step"]).load()
    step, numbers = _last_and_mean(), torch.Generator().manual_seed(1)
    for b, t in [(3, 4), (1, 1), (6, 1), (1, 7), (2, 9)] if "B" in dimensions else [(4, 1), (4, 5), (4, 9)]:
        x, y = torch.randn(b, t, 3, generator=numbers), torch.randn(b, 2, generator=numbers)
        step.optimizer.zero_grad()
        loss = step.loss(step.model(x), y)
        loss.backward()
        step.optimizer.step()
        np.testing.assert_allclose(session.train_step(x=x.numpy(), y=y.numpy()), loss.item(), rtol=1e-5)
    for name, parameter in step.model.named_parameters():
        np.testing.assert_allclose(session.state()[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dimensions", ["BT", "T"])
def test_iree_still_divides_no_work_over_a_slice_beside_a_reduction(
    dimensions: str, tmp_path: Path, without: Callable[[type], None]
) -> None:
    """When this fails, the second kind of the pass is no longer needed."""
    without(KeepSlicesApart)
    with pytest.raises(ToolchainError, match="workgroup distributed contexts"):
        ig.compile(_last_and_mean(*dimensions), tmp_path, entry_points=["predict"])


class _Strided(nn.Module):
    """Every second column of what is computed in bfloat16: in a convolution, and in one of groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 1, stride=2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x.to(self.into.weight.dtype)).relu()).mean((1, 2, 3))


def _distance(made: Tensor, y: Tensor) -> Tensor:
    return (made - y).square().mean()


def _strided(groups: int = 1) -> ig.TrainStep:
    torch.manual_seed(0)
    model = _Strided(groups)
    inputs = {"x": torch.randn(5, 3, 8, 8), "y": torch.randn(5)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = {n: {0: "B"} for n in inputs}
    return ig.TrainStep(model, _distance, optimizer, inputs, dynamic=sizes, precision="bf16")


@needs_x86
@pytest.mark.parametrize("groups", [1, 4])
def test_strided_convolutions_of_bfloat16_train_at_every_size(
    groups: int, tmp_path: Path, trains_as_eager: Callable[..., None]
) -> None:
    entry_points = ["train_step", "reset"]
    session = ig.compile(_strided(groups), tmp_path, target=_AVX2, cache=False, entry_points=entry_points).load()
    batches = [{"x": torch.randn(size, 3, 8, 8), "y": torch.randn(size)} for size in (1, 7, 2)]
    trains_as_eager(session, _strided(groups), batches, rtol=2e-2, state=(2e-2, 2e-2))


@needs_x86
def test_iree_still_computes_all_of_a_strided_slice_on_the_stack(
    tmp_path: Path, without: Callable[[type], None]
) -> None:
    """When this fails, the third kind of the pass is no longer needed."""
    without(KeepSlicesApart)
    with pytest.raises(ToolchainError, match="stack allocation"):
        ig.compile(_strided(), tmp_path, target=_AVX2, cache=False, entry_points=["train_step"])


STRIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "widened": lambda x, y: x.float()[:, ::2] * y,
    "computed from narrower ones": lambda x, y: (x.float() * 2 + 1)[:, ::2] * y,
    "of integers": lambda x, y: x.sign().to(torch.int8).float()[:, ::2] * y,
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_slices_of_widened_numbers_of_known_size_equal_eager(name: str) -> None:
    """compile_function compares with eager float64."""
    x = torch.randn(64, 64, 48, generator=torch.Generator().manual_seed(0))
    ig.compile_function(STRIDED[name], (x.bfloat16(), torch.ones(48)))


def test_iree_still_computes_all_of_a_strided_slice_of_known_size_on_the_stack(without: Callable[[type], None]) -> None:
    """When this fails, the third kind is needed only for slices of any size."""
    without(KeepSlicesApart)
    x = torch.randn(64, 64, 48).bfloat16()
    with pytest.raises(ToolchainError, match="exceeded stack allocation limit"):
        ig.compile_function(lambda x: x.float()[:, ::2] * 3, (x,))


PART = """
util.func public @part(%x: tensor<3072xbf16>, %y: tensor<16x64xf32>) -> tensor<16x64xf32> {
  %empty = tensor.empty() : tensor<3072xf32>
  %wide = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>],
      iterator_types = ["parallel"]} ins(%x : tensor<3072xbf16>) outs(%empty : tensor<3072xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %w = arith.extf %in : bf16 to f32
    linalg.yield %w : f32
  } -> tensor<3072xf32>
  %first = tensor.extract_slice %wide[0] [1] [1] : tensor<3072xf32> to tensor<f32>
  %room = tensor.empty() : tensor<16x64xf32>
  %sum = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> ()>,
      affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%y, %first : tensor<16x64xf32>, tensor<f32>) outs(%room : tensor<16x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<16x64xf32>
  util.return %sum : tensor<16x64xf32>
}
"""


def test_iree_still_widens_all_numbers_where_one_is_read(tmp_path: Path) -> None:
    """When this fails, the fourth kind of the pass is no longer needed."""
    source, flow = tmp_path / "part.mlir", tmp_path / "flow.mlir"
    source.write_text(PART)
    flags = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")
    compile_file([*flags, "--compile-from=global-optimization", "--compile-to=flow"], source, flow)
    assert flow.read_text().count("flow.executable.export") == 1


class _Taps(nn.Module):
    """The gradient of the second convolution multiplies by single taps of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 96, 4, 4), nn.Conv2d(96, 96, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x)).mean((1, 2, 3))


def test_products_with_taps_of_bfloat16_compile_in_seconds(tmp_path: Path) -> None:
    """They took minutes."""
    torch.manual_seed(0)
    model = _Taps()
    inputs = {"x": torch.randn(4, 3, 16, 16), "y": torch.randn(4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, _distance, optimizer, inputs, precision="bf16")
    ig.compile(step, tmp_path, cache=False, entry_points=["train_step"])


TAP = """
func.func @f(%a: tensor<16x96xbf16>, %w: tensor<96x96x3x3xbf16>) -> tensor<16x96xf32> {
  %zero = arith.constant 0.0 : f32
  %tap = tensor.extract_slice %w[0, 0, 1, 1] [96, 96, 1, 1] [1, 1, 1, 1]
      : tensor<96x96x3x3xbf16> to tensor<96x96xbf16>
  %empty = tensor.empty() : tensor<16x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<16x96xf32>) -> tensor<16x96xf32>
  %product = linalg.matmul ins(%a, %tap : tensor<16x96xbf16>, tensor<96x96xbf16>) outs(%zeros : tensor<16x96xf32>)
      -> tensor<16x96xf32>
  return %product : tensor<16x96xf32>
}
"""


def test_iree_still_packs_a_tap_in_the_kernel_of_the_product(tmp_path: Path) -> None:
    """When this fails, the fifth kind of the pass is no longer needed."""
    source, flow = tmp_path / "tap.mlir", tmp_path / "flow.mlir"
    source.write_text(TAP)
    flags = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")
    compile_file([*flags, "--iree-opt-data-tiling=true", "--compile-to=flow"], source, flow)
    kernels = [text for text in flow.read_text().split("flow.executable private") if "linalg.matmul" in text]
    assert len(kernels) == 1
    assert "sizes = [96, 96, 1, 1]" in kernels[0]
