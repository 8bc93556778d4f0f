"""Maximum, minimum and clamp that propagate NaN, as eager does.

torch-mlir 20261001 lowers them to a comparison and a select, which replace a NaN by the other operand or by the bound.
A loss that has become NaN would turn finite.
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.maximum.default)
def _maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    return torch.where((x >= y) | (x != x), x, y).to(dtype) if dtype.is_floating_point else NotImplemented


@decomposes(aten.minimum.default)
def _minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    return torch.where((x <= y) | (x != x), x, y).to(dtype) if dtype.is_floating_point else NotImplemented


@decomposes(aten.clamp.default)
def _clamp(x: torch.Tensor, min: float | None = None, max: float | None = None) -> torch.Tensor:
    """If the lower bound exceeds the upper bound, the result is the upper bound."""
    if not x.is_floating_point():
        return _clamp_integers(x, min, max)
    if any(b is not None and math.isnan(b) for b in (min, max)):
        return torch.full_like(x, math.nan)
    result = x if min is None else torch.where(x < min, min, x)
    return result if max is None else torch.where(result > max, max, result)


def _clamp_integers(x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    dtype = x.dtype
    for bound in (low, high):
        dtype = dtype if bound is None else torch.promote_types(dtype, torch.result_type(x, bound))
    return NotImplemented if dtype == x.dtype else aten.clamp.default(x.to(dtype), low, high)


@decomposes(aten.clamp_min.default)
def _clamp_min(x: torch.Tensor, min: float) -> torch.Tensor:
    return aten.clamp.default(x, min)


@decomposes(aten.clamp_max.default)
def _clamp_max(x: torch.Tensor, max: float) -> torch.Tensor:
    return aten.clamp.default(x, None, max)


@decomposes(aten.clamp.Tensor)
def _clamp_between(x: torch.Tensor, min: torch.Tensor | None = None, max: torch.Tensor | None = None) -> torch.Tensor:
    result = x if min is None else torch.maximum(x, min)
    return result if max is None else torch.minimum(result, max)


@decomposes(aten.clamp_min.Tensor)
def _clamp_above(x: torch.Tensor, min: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x, min)


@decomposes(aten.clamp_max.Tensor)
def _clamp_below(x: torch.Tensor, max: torch.Tensor) -> torch.Tensor:
    return torch.minimum(x, max)


@decomposes(aten.hardtanh.default)
def _hardtanh(x: torch.Tensor, min_val: float = -1, max_val: float = 1) -> torch.Tensor:
    return aten.clamp.default(x, min_val, max_val)


@decomposes(aten.hardsigmoid.default)
def _hardsigmoid(x: torch.Tensor) -> torch.Tensor:
    return aten.clamp.default(x + 3, 0, 6) / 6
