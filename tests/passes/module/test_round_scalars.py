"""Numbers of bfloat16 that whole tensors read: norms, means and maxima."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import irongrad as ig
from irongrad.passes.module.round_scalars import RoundScalars


def _norm(x: Tensor) -> Tensor:
    return x.norm().float()


def _kept(x: Tensor) -> Tensor:
    return x.mean((0, 1), keepdim=True).float()


def _divided(x: Tensor) -> Tensor:
    """What torch.optim.Muon does before its iterations."""
    return (x / x.norm().clamp(min=1e-7)).float()


def _numbers(last: float) -> Tensor:
    x = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[-1, -1] = last
    return x


@pytest.mark.parametrize("last", [0.5, 1e30, 1e-40, -0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("function", [_norm, _kept, _divided])
def test_a_number_is_rounded_as_eager_rounds_it(function: Callable[[Tensor], Tensor], last: float) -> None:
    x = _numbers(last)
    found = ig.compile_function(function, (x,))(x)
    torch.testing.assert_close(torch.from_numpy(found), function(x), rtol=0, atol=0, equal_nan=True)


def test_iree_still_drops_the_rounding_of_a_number(without: Callable[[type], None]) -> None:
    """When this fails, the pass is no longer needed."""
    without(RoundScalars)
    x = _numbers(0.5)
    (found,) = ig.compile_function(lambda x: [_norm(x)], (x,), cache=False)(x)
    assert float(found) != float(_norm(x))
