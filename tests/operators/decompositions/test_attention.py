"""Softmax and its backward, at several ranks and dtypes and with infinities, against PyTorch's own."""

from __future__ import annotations

import math

import pytest
import torch

from irongrad.operators.decompositions import decomposition_table

aten = torch.ops.aten

INFINITE = torch.tensor([[math.inf, 1.0], [-math.inf, -math.inf], [math.nan, 1.0], [-math.inf, 2.0]])
INPUTS = {
    "rank 0": (torch.tensor(2.0), 0),
    "rank 1": (torch.arange(4.0), -1),
    "a middle dimension": (torch.arange(24.0).reshape(2, 3, 4).sin(), 1),
    "empty": (torch.empty(3, 0), 1),
    "no rows": (torch.empty(0, 3), 1),
    "infinite": (INFINITE, 1),
    "float16": (torch.arange(6.0).reshape(2, 3).half(), 1),
    "large": (torch.tensor([[1e30, -1e30, 3.0]]), 1),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("operator", [aten._softmax.default, aten._log_softmax.default])
def test_softmax_and_its_backward_match_aten(operator: torch._ops.OpOverload, name: str) -> None:
    x, dim = INPUTS[name]
    found, expected = decomposition_table()[operator](x, dim, False), operator(x, dim, False)
    torch.testing.assert_close(found, expected, equal_nan=True)
    grad = torch.ones_like(expected).cumsum(dim)
    backward = {
        aten._softmax.default: aten._softmax_backward_data.default,
        aten._log_softmax.default: aten._log_softmax_backward_data.default,
    }[operator]
    arguments = (grad, expected, dim, x.dtype)
    torch.testing.assert_close(decomposition_table()[backward](*arguments), backward(*arguments), equal_nan=True)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", sorted(set(INPUTS) - {"float16"}))
def test_logsumexp_matches_aten(name: str, keepdim: bool) -> None:
    x, dim = INPUTS[name]
    found = decomposition_table()[aten.logsumexp.default](x, [dim], keepdim)
    torch.testing.assert_close(found, torch.logsumexp(x, dim, keepdim), equal_nan=True)
