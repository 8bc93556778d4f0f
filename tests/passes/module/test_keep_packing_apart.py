"""Products of operands that a kernel computes with other dimensions than the product reads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import irongrad as ig
from irongrad.mlir.tools import run_tool
from irongrad.passes.module.keep_packing_apart import KeepPackingApart
from irongrad.passes.module.matmul_kernels import MatmulKernels
from tests.fixtures.compiled_steps import AroundPass, Without

TARGETS = ["llvm-cpu:cpu=x86-64-v4", "llvm-cpu:cpu=x86-64-v3", "llvm-cpu:cpu=x86-64"]
HALF, FLOAT = torch.bfloat16, torch.float32

# By name: a function, the sizes of its arguments, and their dtype.
PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], torch.dtype]] = {
    "a transposed left operand": (lambda x, y: torch.bmm(x.permute(1, 2, 0), y), [(16, 3, 31), (3, 16, 17)], FLOAT),
    "a right operand": (
        lambda x, y, z: torch.einsum("bmk,bnk->bmn", x, y + z),
        [(3, 17, 7), (3, 31, 7), (7,)],
        FLOAT,
    ),
    "the result of a layer": (
        lambda x, w, y: torch.bmm((x @ w).relu().view(2, 63, 17), y),
        [(126, 5), (5, 17), (2, 17, 31)],
        FLOAT,
    ),
    "a sum with a bias": (lambda x, b, y: torch.bmm(x + b, y), [(5, 15, 17), (17,), (5, 17, 30)], FLOAT),
    "a sum with a bias, in half precision": (
        lambda x, b, y: torch.bmm(x + b, y),
        [(4, 15, 33), (33,), (4, 33, 17)],
        HALF,
    ),
    "rows less their maximum": (lambda x, y: torch.bmm(x - x.amax(-1, True), y), [(3, 62, 5), (3, 5, 7)], FLOAT),
}


def _integers(sizes: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-4, 5, tuple(sizes), generator=generator).to(dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_are_packed_by_the_rows_of_each_batch(name: str, target: str) -> None:
    """compile_function compares with eager float64."""
    function, sizes, dtype = PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    given = [_integers(size, dtype, generator) for size in sizes]
    ig.compile_function(function, given, target=target, cache=False)


def test_operands_of_any_permutation(without: Without, around_pass: AroundPass) -> None:
    """IREE computes all products here."""
    without(MatmulKernels)
    seen = around_pass(KeepPackingApart)
    orders = st.sampled_from(list(itertools.permutations(range(3))))
    rows = st.sampled_from([15, 16, 31, 63])

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(orders, orders, st.integers(2, 6), rows, st.integers(1, 17), rows, st.sampled_from([FLOAT, HALF]))
    def check(
        left: Sequence[int], right: Sequence[int], batches: int, m: int, k: int, n: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(left, (batches, m, k)), (right, (batches, k, n))]
        x, y = (_integers([sizes[order.index(d)] for d in range(3)], dtype, generator) for order, sizes in shapes)
        bias = _integers([k], dtype, generator)
        ig.compile_function(lambda x, b, y: torch.bmm(x.permute(left) + b, y.permute(right)), (x, bias, y), cache=False)

    check()
    assert seen[::2] != seen[1::2]


class _Columns(nn.Module):
    """Products of the columns of an input, of which there may be any number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 16, 17, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.permute(1, 2, 0), self.w)


def test_operands_with_any_number_of_rows(tmp_path: Path) -> None:
    model = _Columns()
    twin = copy.deepcopy(model).double()
    inputs = {"x": torch.randn(16, 3, 5), "y": torch.randn(3, 5, 17)}
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss
    step = ig.TrainStep(model, loss, optimizer, inputs, dynamic={"x": {2: "T"}, "y": {1: "T"}})
    session = ig.compile(step, tmp_path / "out", entry_points=["train_step"]).load()
    for rows in (31, 1, 16, 40):
        x, y = torch.randn(16, 3, rows), torch.randn(3, rows, 17)
        wanted = loss(twin(x.double()), y.double())
        (gradient,) = torch.autograd.grad(wanted, twin.w)
        np.testing.assert_allclose(session.train_step(x=x.numpy(), y=y.numpy()), wanted.item(), rtol=1e-5)
        twin.w.data -= 0.1 * gradient
    np.testing.assert_allclose(session.state()["w"], twin.w.detach(), rtol=1e-4, atol=1e-6)


def test_iree_still_packs_the_rows_of_several_batches_as_one(tmp_path: Path) -> None:
    """When this fails, the pass may no longer be needed."""
    source = tmp_path / "module.mlir"
    source.write_text("""func.func @f(%x: tensor<93x16xf32>) -> tensor<3x2x16x16x1xf32> {
      %zero = arith.constant 0.0 : f32
      %rows = tensor.expand_shape %x [[0, 1], [2]] output_shape [3, 31, 16]
          : tensor<93x16xf32> into tensor<3x31x16xf32>
      %tiles = tensor.empty() : tensor<3x2x16x16x1xf32>
      %packed = linalg.pack %rows padding_value(%zero : f32) outer_dims_perm = [0, 1, 2] inner_dims_pos = [1, 2]
          inner_tiles = [16, 1] into %tiles : tensor<3x31x16xf32> -> tensor<3x2x16x16x1xf32>
      return %packed : tensor<3x2x16x16x1xf32>
    }""")
    passes = "--pass-pipeline=builtin.module(func.func(iree-codegen-cpu-propagate-data-layout))"
    result = run_tool("iree-opt", [passes, str(source)])
    assert result.returncode == 0, result.stderr
    assert "linalg.pack %arg0" in result.stdout
