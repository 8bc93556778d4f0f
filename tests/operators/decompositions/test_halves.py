"""Arithmetic of 16-bit tensors with numbers that their dtype cannot hold: computed in float32, rounded once."""

from __future__ import annotations

import pytest
import torch

from irongrad.operators.decompositions.halves import _ARITHMETIC
from irongrad.operators.legalize.retrace import retrace


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", _ARITHMETIC, ids=str)
def test_arithmetic_with_numbers_outside_the_dtype_is_in_float32(
    operator: torch._ops.OpOverload, dtype: torch.dtype
) -> None:
    x = torch.linspace(-60_000, 60_000, 64).to(dtype)
    for number in (1e-6, 0.1, 100_000.0):
        graph = retrace(lambda t: [operator(t, number)], [x])  # noqa: B023
        assert torch.equal(graph(x)[0], operator(x.float(), number).to(dtype))
        (call,) = [n for n in graph.graph.nodes if n.target is operator]
        assert call.meta["val"].dtype is torch.float32


@pytest.mark.parametrize("operator", _ARITHMETIC, ids=str)
def test_arithmetic_with_numbers_of_the_dtype_is_unchanged(operator: torch._ops.OpOverload) -> None:
    graph = retrace(lambda t: [operator(t, 0.5)], [torch.ones(3).half()])
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [operator]
