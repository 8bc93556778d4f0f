"""Products of matrices and vectors: as sums over the matrix as it is stored, beside eager, and as IREE packs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import irongrad as ig
from irongrad.passes.module.vector_products import VectorProducts
from tests.fixtures.compiled_steps import AroundPass
from tests.fixtures.module_texts import printed_after

ORDERS = ((0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1))


@pytest.mark.parametrize("target", ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"])
def test_products_equal_eager(target: str, around_pass: AroundPass) -> None:
    """compile_function compares with eager float64; a batch of rows or columns, of matrices in any memory order."""
    seen = around_pass(VectorProducts)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.sampled_from(ORDERS), st.integers(700, 900), st.integers(3, 32), st.integers(31, 66), st.booleans())
    def check(order: tuple[int, ...], batch: int, summands: int, columns: int, row: bool) -> None:
        sizes = (batch, summands, columns)
        matrix = torch.randn([sizes[d] for d in order])
        back = [order.index(d) for d in range(3)]

        def product(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
            stored = matrix.permute(back)
            return vector.mT @ stored if row else stored.mT @ vector

        ig.compile_function(product, (matrix, torch.randn(batch, summands, 1)), target=target, cache=False)

    check()
    assert seen[::2] != seen[1::2]


def test_a_sum_of_weighted_experts_trains_as_eager_does(around_pass: AroundPass, tmp_path: Path) -> None:
    """`ig.compile` compares with eager; the products of a mixture of experts and their gradients."""
    seen = around_pass(VectorProducts)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)

    def loss(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.einsum("etd,te->td", experts, weights).square().mean()

    step = ig.TrainStep(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"x": torch.randn(1024, 64), "experts": torch.randn(8, 1024, 64)},
    )
    ig.compile(step, tmp_path / "a", entry_points=("train_step",), cache=False)
    assert seen[::2] != seen[1::2]


def test_rows_that_all_share_one_vector(tmp_path: Path) -> None:
    """A loop that neither operand has: over equal rows. `ig.compile` compares with eager."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16 * 12)

    def loss(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows[:, None].expand(-1, 5, 16), matrices.view(-1, 16, 12)).square().mean()

    inputs = {"x": torch.randn(6, 16), "rows": torch.randn(6, 16)}
    sizes = {"x": {0: "B"}, "rows": {0: "B"}}
    step = ig.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs, dynamic=sizes)
    ig.compile(step, tmp_path / "a", entry_points=("train_step",), cache=False)


def test_iree_still_packs_the_matrix_of_such_a_product(tmp_path: Path) -> None:
    """When this fails, the pass may no longer be needed."""
    x, v, sums = "tensor<2048x1024xf32>", "tensor<1024xf32>", "tensor<2048xf32>"
    printed = printed_after(
        "iree-dispatch-creation-set-encoding",
        f"""func.func @f(%x: {x}, %v: {v}) -> {sums} {{
          %zero = arith.constant 0.0 : f32
          %empty = tensor.empty() : {sums}
          %zeros = linalg.fill ins(%zero : f32) outs(%empty : {sums}) -> {sums}
          %sums = linalg.matvec ins(%x, %v : {x}, {v}) outs(%zeros : {sums}) -> {sums}
          return %sums : {sums}
        }}""",
        tmp_path,
        "--iree-opt-data-tiling",
    )
    assert "iree_encoding.set_encoding" in printed
