"""Elementwise operations with several readers share a kernel; products stay apart from readers of many operands."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch
from iree.compiler.tools.binaries import find_tool

import irongrad as ig
from irongrad.mlir.barriers import BARRIER
from irongrad.mlir.walk import found_in, inside, parsed
from irongrad.passes.module import fuse_elementwise
from irongrad.passes.module.fuse_elementwise import FuseElementwise
from irongrad.passes.module.keep_products_apart import KeepProductsApart
from irongrad.pipeline.driver import build
from irongrad.pipeline.options import make_options
from irongrad.runtime.errors import ArtifactError

Tensors = tuple[torch.Tensor, ...]

SIZE = 32
X, Y, Z = (torch.randn(SIZE, SIZE) for _ in range(3))
LARGE = torch.randn(128, 128), torch.randn(128, 128)


def chain(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Each value is a result, and has several readers."""
    values = [x * y, x + y]
    for _ in range(4):
        values.append((values[-1] * values[-2]).tanh() + values[0])
    return tuple(values)


def softmax(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """A chain whose last value a reduction and another result read."""
    values = chain(x, y)
    return values[-1].softmax(-1), values[-1] * values[-2]


def gated(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """A product whose reader reads three other values."""
    return (x @ y) * x.tanh() + y * z


def scaled(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """A product whose reader reads one other value, and a row."""
    return (x @ y) * z[0] + x


def kernels(flow: bytes) -> int:
    with parsed(flow) as module:
        return len(found_in(module, "flow.dispatch"))


def test_a_chain_is_one_kernel_and_iree_still_makes_several(flow_of, without):
    """When the second assertion fails, IREE fuses as much, and the pass can go."""
    assert kernels(flow_of(chain, (X, Y))) == 1
    without(FuseElementwise)
    assert kernels(flow_of(chain, (X, Y))) > 1


def long_chain(x: torch.Tensor) -> Tensors:
    """40 results, each computed from the one before."""
    values = [x]
    for number in range(40):
        values.append((values[-1] * (1 + number / 100)).sin())
    return tuple(values[1:])


def test_results_of_one_kernel_are_split_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second part fails, IREE loads kernels of many bindings, and results need not be split."""
    ig.compile_function(long_chain, (X,))
    monkeypatch.setattr(fuse_elementwise, "_MOST_BINDINGS", 1000)
    with pytest.raises(ArtifactError, match="binding count"):
        ig.compile_function(long_chain, (X,))


def test_operands_of_a_reduction_are_left_to_iree(flow_of, without):
    fused = kernels(flow_of(softmax, (X, Y)))
    without(FuseElementwise)
    assert fused <= kernels(flow_of(softmax, (X, Y)))


def test_large_results_are_left_to_iree(flow_of, without):
    fused = flow_of(chain, LARGE)
    without(FuseElementwise)
    assert fused == flow_of(chain, LARGE)


def test_new_state_is_computed_in_the_kernel_of_its_readers(tmp_path, without):
    """Even a large state, because the step writes it in any case."""
    model = torch.nn.Linear(128, 128, bias=False)
    inputs = {"x": torch.randn(4, 128), "y": torch.randn(4, 128)}
    step = ig.TrainStep(model, torch.nn.functional.mse_loss, torch.optim.Adam(model.parameters()), inputs)
    options = make_options(tmp_path / "artifact", entry_points=("train_step",), cache=False)
    fused = build(step, options).statistics["llvm-cpu"].dispatches
    without(FuseElementwise)
    assert build(step, options).statistics["llvm-cpu"].dispatches > fused


TRANSPOSED = """
#order = affine_map<(d0, d1) -> (d0, d1)>
util.func public @f(%x: tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<8x4xf32>) {
  %empty = tensor.empty() : tensor<4x8xf32>
  %both:2 = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x8xf32>) outs(%empty, %empty : tensor<4x8xf32>, tensor<4x8xf32>) {
  ^bb0(%element: f32, %out0: f32, %out1: f32):
    %sum = arith.addf %element, %element : f32
    %square = arith.mulf %element, %element : f32
    linalg.yield %sum, %square : f32, f32
  } -> (tensor<4x8xf32>, tensor<4x8xf32>)
  %turned = tensor.empty() : tensor<8x4xf32>
  %result = linalg.transpose ins(%both#1 : tensor<4x8xf32>) outs(%turned : tensor<8x4xf32>) permutation = [1, 0]
  util.return %both#0, %result : tensor<4x8xf32>, tensor<8x4xf32>
}
"""


def test_iree_still_transposes_one_of_several_results_wrongly(tmp_path):
    """When this fails, the pass may fuse in the assembled module, once for all targets."""
    (tmp_path / "module.mlir").write_text(TRANSPOSED)
    passes = "builtin.module(util.func(iree-global-opt-propagate-linalg-transpose))"
    command = [find_tool("iree-opt"), f"--pass-pipeline={passes}", str(tmp_path / "module.mlir")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "expected number of yield values (2)" in result.stderr


@pytest.mark.parametrize(("function", "apart"), [(gated, True), (scaled, False)])
def test_products_stay_apart_from_readers_of_much(flow_of, without, function, apart):
    flow = flow_of(function, (X, Y, Z))
    with parsed(flow) as module:
        assert not any(op.name == BARRIER for op in inside(module.operation))
    without(KeepProductsApart)
    assert (kernels(flow) > kernels(flow_of(function, (X, Y, Z)))) == apart


@pytest.mark.parametrize(
    ("function", "given"), [(chain, (X, Y)), (chain, LARGE), (softmax, (X, Y)), (gated, (X, Y, Z)), (scaled, (X, Y, Z))]
)
def test_results_are_right(function: Callable[..., object], given: Tensors):
    """Compilation verifies the results."""
    ig.compile_function(function, given)
