"""Comparisons of constants with numbers, which torch-mlir folds."""

from __future__ import annotations

import torch

import irongrad as ig


def test_compiled_comparisons_of_constants_match_eager():
    """Compiling compares the results with eager."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        zero, yes, two = torch.zeros(()), torch.ones(3, dtype=torch.bool), torch.full((3,), 2)
        tests = [zero > 0, zero >= 0, zero.ne(0), yes > 0, yes.eq(True), yes < 0.5, two > 1.5, two.eq(2), two <= 1]
        return [torch.where(t, x, -x) for t in tests]

    ig.compile_function(run, (torch.tensor([1.0, -2.0, 3.0]),))
