"""Sums in chunks whose number no small number divides: the tiles that we choose for them, and IREE's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import irongrad as ig
from irongrad.passes.module.tile_sums import TileSums
from tests.fixtures.compiled_steps import AroundPass, Without
from tests.fixtures.module_texts import printed_after

PRIMES = (67, 73, 127, 262, 347, 1733)


@pytest.mark.parametrize("target", ["llvm-cpu", "llvm-cpu:cpu=x86-64-v3"])
def test_tiled_sums_equal_eager(target: str, around_pass: AroundPass) -> None:
    """compile_function compares with eager float64; sums of exponentials, of squares of rows, and of one row."""
    seen = around_pass(TileSums)

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(st.sampled_from(PRIMES), st.integers(1, 40), st.integers(2, 230), st.booleans())
    def check(chunks: int, rows: int, chunk: int, squares: bool) -> None:
        x = torch.randn(rows, chunks, chunk)

        def sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((x - y) * (x - y) if squares else (x - y).exp()).sum(2)

        ig.compile_function(sums, (x, torch.randn(rows, 1, 1)), target=target, cache=False)

    check()
    assert seen[::2] != seen[1::2]


def test_the_numbers_are_those_of_other_tiles(without: Without) -> None:
    """Each chunk is one chain of vectors in both."""
    x, y = torch.randn(3, 1733, 29), torch.randn(3, 1, 1)

    def sums() -> torch.Tensor:
        found: torch.Tensor = ig.compile_function(lambda x, y: (x - y).exp().sum(2), (x, y), cache=False)(x, y)
        return found

    tiled = sums()
    without(TileSums)
    torch.testing.assert_close(sums(), tiled, rtol=0, atol=0)


@pytest.mark.parametrize(("chunks", "at_once"), [(1733, 1), (262, 2)])
def test_iree_still_computes_few_sums_at_once(chunks: int, at_once: int, tmp_path: Path) -> None:
    """When this fails, the pass may no longer be needed. A number a row keeps IREE from joining rows and chunks."""
    x, y, sums = f"tensor<64x{chunks}x192xf32>", "tensor<64xf32>", f"tensor<64x{chunks}xf32>"
    printed = printed_after(
        "iree-llvmcpu-select-lowering-strategy",
        f"""func.func @f(%x: {x}, %y: {y}) -> {sums} {{
          %zero = arith.constant 0.0 : f32
          %empty = tensor.empty() : {sums}
          %zeros = linalg.fill ins(%zero : f32) outs(%empty : {sums}) -> {sums}
          %sums = linalg.generic {{indexing_maps = [affine_map<(r, c, k) -> (r, c, k)>, affine_map<(r, c, k) -> (r)>,
              affine_map<(r, c, k) -> (r, c)>], iterator_types = ["parallel", "parallel", "reduction"]}}
              ins(%x, %y : {x}, {y}) outs(%zeros : {sums}) {{
          ^bb0(%a: f32, %b: f32, %sum: f32):
            %difference = arith.subf %a, %b : f32
            %next = arith.addf %difference, %sum : f32
            linalg.yield %next : f32
          }} -> {sums}
          return %sums : {sums}
        }}""",
        tmp_path,
    )
    assert f"vector_common_parallel = [1, {at_once}, 0]" in printed
