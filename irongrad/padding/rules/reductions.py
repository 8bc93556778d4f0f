"""Padding rules of reductions and scans: padding becomes the identity, and means are over true elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from irongrad.operators.decompositions.reductions import first_along
from irongrad.padding.layout import Layout, dim_of, solid
from irongrad.padding.padded import HIGHEST, LOWEST, Padded
from irongrad.padding.registry import Call, NoRule, aten, rule

_IDENTITIES: dict[OpOverload, float | str] = {
    aten.sum.default: 0,
    aten.sum.dim_IntList: 0,
    aten.nansum.default: 0,
    aten.prod.default: 1,
    aten.prod.dim_int: 1,
    aten.amax.default: LOWEST,
    aten.amin.default: HIGHEST,
    aten.max.default: LOWEST,
    aten.min.default: HIGHEST,
    aten.any.default: 0,
    aten.any.dim: 0,
    aten.any.dims: 0,
    aten.all.default: 1,
    aten.all.dim: 1,
    aten.all.dims: 1,
    aten.logsumexp.default: LOWEST,
}


def reduced(value: Padded, dims: Sequence[int], *, keepdim: bool) -> Layout:
    """The layout of the result of a reduction of `value` over `dims`."""
    kept = [(d, solid(dim)) for d, dim in enumerate(value.layout)]
    return tuple(dim_of(1) if d in dims else dim for d, dim in kept if keepdim or d not in dims)


def _dims(call: Call) -> list[int]:
    dims: list[int] = call["self"].dims(call.arguments.get("dim"))
    return dims


def _layout(call: Call) -> Layout:
    return reduced(call["self"], _dims(call), keepdim=bool(call.arguments.get("keepdim")))


@rule(*_IDENTITIES)
def _reduction(call: Call) -> Padded:
    filled = call.padding.fill(call["self"], _IDENTITIES[call.operator], _dims(call))
    return Padded(call.run(self=filled), _layout(call))


@rule(aten.linalg_vector_norm.default)
def _norm(call: Call) -> Padded:
    if call["ord"] < 0:
        raise NoRule(f"with ord={call['ord']} has no padding rule")
    return Padded(call.run(self=call.padding.fill(call["self"], 0, _dims(call))), _layout(call))


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> Padded:
    value, dims = call["self"], _dims(call)
    dtype = call["dtype"] or value.tensor.dtype
    total = wide(call.padding.fill(value, 0, dims)).sum(dims, keepdim=bool(call.arguments.get("keepdim")))
    return Padded((total / call.padding.count(value, dims)).to(dtype), _layout(call))


def wide(tensor: Tensor) -> Tensor:
    """Cast half precision to float32, the dtype in which ATen accumulates it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def moments(call: Call, value: Padded, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The mean and the sum of squared deviations of the true elements along `dims`, kept as dimensions of size 1."""
    x = Padded(wide(value.tensor), value.layout)
    count = call.padding.count(value, dims)
    mean = call.padding.fill(x, 0, dims).sum(dims, keepdim=True) / count
    centred = call.padding.fill(Padded(x.tensor - mean, x.layout), 0, dims)
    return mean, (centred * centred).sum(dims, keepdim=True)


def _variance(call: Call) -> tuple[Tensor, Tensor]:
    value, dims = call["self"], _dims(call)
    x = wide(value.tensor)
    first = first_along(x, dims)  # equal elements deviate from it by exactly 0, as in eager
    mean, squares = moments(call, Padded(x - first, value.layout), dims)
    correction = 1 if call["correction"] is None else call["correction"]
    free: Any = call.padding.count(value, dims) - correction
    shape = [call.padding.extent(d) for d in _layout(call)]
    divisor = free.clamp(min=0) if isinstance(free, Tensor) else max(free, 0)
    return (squares / divisor).reshape(shape).to(value.tensor.dtype), (mean + first).reshape(shape).to(
        value.tensor.dtype
    )


@rule(aten.var.correction, aten.std.correction)
def _var(call: Call) -> Padded:
    variance, _ = _variance(call)
    return Padded(variance.sqrt() if call.operator is aten.std.correction else variance, _layout(call))


@rule(aten.var_mean.correction, aten.std_mean.correction)
def _var_mean(call: Call) -> list[Padded]:
    variance, mean = _variance(call)
    spread = variance.sqrt() if call.operator is aten.std_mean.correction else variance
    return [Padded(spread, _layout(call)), Padded(mean, _layout(call))]


def in_order(value: Padded, d: int) -> None:
    """Refuse a dimension whose true elements do not all come first.

    Raises:
        NoRule: padding lies between true elements.
    """
    if value.ndim and len(value.layout[d]) > 1:
        raise NoRule("works along a dimension whose padding lies between true elements, as after view(B * T)")


@rule(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
def _scan(call: Call) -> Padded:
    """An element does not depend on later ones, so padding at the end needs no mask."""
    value = call["self"]
    in_order(value, call["dim"])
    return Padded(call.run(), tuple(map(solid, value.layout)))


@rule(aten.cummax.default, aten.cummin.default)
def _extremes_so_far(call: Call) -> list[Padded]:
    value = call["self"]
    in_order(value, call["dim"])
    return [Padded(r, tuple(map(solid, value.layout))) for r in call.run()]


_EXTREMES: dict[OpOverload, float | str] = {
    aten.argmax.default: LOWEST,
    aten.argmin.default: HIGHEST,
    aten.max.dim: LOWEST,
    aten.min.dim: HIGHEST,
}


@rule(*_EXTREMES)
def _with_index(call: Call) -> Padded | list[Padded]:
    value, dims = call["self"], _dims(call)
    for d in dims:
        in_order(value, d)
    if any(d > 0 and len(dims) > 1 for d in value.padded(dims)):
        raise NoRule("returns one index over several dimensions, and an inner one is padded")
    results: Any = call.run(self=call.padding.fill(value, _EXTREMES[call.operator], dims))
    if isinstance(results, Tensor):
        return Padded(results, _layout(call))
    return [Padded(r, _layout(call)) for r in results]
