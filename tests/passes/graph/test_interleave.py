"""The pass interleave: one elementwise function in place of a concatenation of several."""

from __future__ import annotations

import pytest
import torch

from irongrad.passes.graph.interleave import Interleave


def random(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.cat([a.exp(), b.sin(), a * b], 1),
        lambda a, b: torch.cat([a.exp(), b.sin()], -1),
        lambda a, b: torch.stack([a.exp(), b.sin(), a * b, a + b], 2),
    ],
)
def test_elementwise_parts_are_one_function(apply, fn):
    done = apply(Interleave(), fn, random(3, 4, 5), random(3, 4, 5))
    assert done.stats == {"interleaved": 1}
    assert not done.operators["aten.cat.default"] + done.operators["aten.stack.default"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.cat([a.exp(), b.sin()], 0),  # each part is contiguous in the result
        lambda a, b: torch.cat([a, b.sin()], 1),  # a part is an input
        lambda a, b: torch.cat([a.exp(), b[:, :2].sin()], 1),  # of different sizes
        lambda a, b: torch.cat([a.exp()] * 5, 1),  # too many parts
    ],
)
def test_other_concatenations_stay(apply, fn):
    assert not apply(Interleave(), fn, random(3, 4, 5), random(3, 4, 5)).changed
