"""Sums of products that read each number once: what they compute with `hide-products`, and IREE's code without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import irongrad as ig
from irongrad.passes.module.hide_products import HideProducts
from tests.fixtures.compiled_steps import AroundPass
from tests.fixtures.module_texts import printed_after

SUMS = {
    "squares": lambda x, y: x * x,
    "squares of differences": lambda x, y: (x - y) * (x - y),
    "products": lambda x, y: x * y,
    "three factors": lambda x, y: x * y * x,
}


@pytest.mark.parametrize("target", ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"])
def test_hidden_products_are_added_as_before(target: str, around_pass: AroundPass) -> None:
    """compile_function compares with eager float64, for sums over any dimension."""
    seen = around_pass(HideProducts)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.sampled_from(sorted(SUMS)), st.lists(st.integers(2, 70), min_size=3, max_size=3), st.integers(0, 2))
    def check(name: str, sizes: list[int], dimension: int) -> None:
        x, y = torch.randn(sizes), torch.randn(sizes)
        ig.compile_function(lambda x, y: SUMS[name](x, y).sum(dimension), (x, y), target=target, cache=False)

    check()
    assert seen[::2] != seen[1::2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_a_contraction_with_whole_numbers_is_left_alone(dtype: torch.dtype) -> None:
    """A sum over what a mask keeps; compile_function compares with eager float64."""
    x, mask = torch.randn(64, 16, 128), torch.randint(0, 2, (64, 16)).to(dtype)
    ig.compile_function(lambda x, mask: (x * mask[..., None]).sum(1), (x, mask), cache=False)


def test_what_is_no_number_stays_so() -> None:
    x = torch.ones(4, 32, 48)
    x[0, 3, 7], x[1, 2, 8], x[2, 1, 9] = torch.inf, -torch.inf, torch.nan
    squares = ig.compile_function(lambda x: (x * x).sum(1), (torch.ones_like(x),), cache=False)
    np.testing.assert_array_equal(squares(x.numpy()), (x * x).sum(1).numpy())


def test_iree_still_takes_sums_of_squares_for_contractions(tmp_path: Path) -> None:
    """When this fails, the pass may no longer be needed."""
    x, sums = "tensor<128x64x96xf32>", "tensor<128x96xf32>"
    printed = printed_after(
        "iree-codegen-generic-vectorization",
        f"""func.func @f(%x: {x}) -> {sums} {{
          %zero = arith.constant 0.0 : f32
          %empty = tensor.empty() : {sums}
          %zeros = linalg.fill ins(%zero : f32) outs(%empty : {sums}) -> {sums}
          %sums = linalg.generic {{indexing_maps = [affine_map<(n, c, k) -> (n, k, c)>,
              affine_map<(n, c, k) -> (n, c)>], iterator_types = ["parallel", "parallel", "reduction"]}}
              ins(%x : {x}) outs(%zeros : {sums}) {{
          ^bb0(%a: f32, %sum: f32):
            %square = arith.mulf %a, %a : f32
            %next = arith.addf %square, %sum : f32
            linalg.yield %next : f32
          }} -> {sums}
          return %sums : {sums}
        }}""",
        tmp_path,
    )
    assert "vector.contract" in printed
