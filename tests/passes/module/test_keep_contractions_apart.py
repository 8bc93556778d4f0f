"""Sums of products with a weight for each head: their batch dimension comes behind that of the samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import irongrad as ig
from irongrad.passes.module.keep_contractions_apart import KeepContractionsApart
from irongrad.runtime.errors import ToolchainError


def _scaled(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(-1, keepdim=True) * x


def _attended(x: Tensor, w: Tensor) -> Tensor:
    """The weights of a graph attention layer, over the samples."""
    return torch.nn.functional.leaky_relu((x * w).sum(-1, keepdim=True)).softmax(0) * x


def _grouped(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a group normalisation of features."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.group_norm(x.flatten(1), w.shape[0], w.flatten()).tanh().square().sum()

    return torch.func.grad(loss, argnums=(0, 1))(x, w)


@pytest.mark.parametrize("function", [_scaled, _attended, _grouped])
@pytest.mark.parametrize("shape", [(8, 4, 8), (2, 7, 3, 33), (64, 32, 48)], ids=str)
def test_a_weight_for_each_head_gives_the_same_numbers(
    function: Callable[..., Tensor | tuple[Tensor, ...]], shape: tuple[int, ...]
) -> None:
    numbers = torch.Generator().manual_seed(0)
    if function is _grouped:
        shape = shape[-3:]
    x, w = torch.randn(shape, generator=numbers), torch.randn(shape[-2:], generator=numbers)
    got = ig.compile_function(function, (x, w), cache=False)(x, w)
    wanted = function(x.double(), w.double())
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()))


def test_iree_still_fails_on_contractions_with_an_inner_batch_dimension(without: Callable[[type], None]) -> None:
    """When this fails, the pass is no longer needed."""
    without(KeepContractionsApart)
    with pytest.raises(ToolchainError, match="restricted to workgroup distributed contexts"):
        ig.compile_function(_scaled, (torch.randn(8, 4, 8), torch.randn(4, 8)), cache=False)
