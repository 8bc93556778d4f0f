"""Reductions, cumulative sums, and positions of extremes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from irongrad.onnx.registry import Call, Value, operator, tensor

Reduction = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
}


@operator(*_REDUCTIONS)
def reduction(call: Call, x: Value, axes: Value | None = None) -> Tensor:
    """Reduce over axes that are an attribute or an input; if there are none, over all axes or over none."""
    value = tensor(x)
    given = call.option(axes, "axes")
    if not given and call.get("noop_with_empty_axes", 0):
        # A reduction over no axis reduces one element each.
        return _REDUCTIONS[call.node.operator](value.unsqueeze(-1), (-1,), False)
    chosen = tuple(a % value.ndim for a in given) if given else tuple(range(value.ndim))
    if not value.ndim:
        return _REDUCTIONS[call.node.operator](value.reshape(1), (0,), False)
    return _REDUCTIONS[call.node.operator](value, chosen, bool(call.get("keepdims", 1)))


@operator("ArgMax", "ArgMin")
def arg_extreme(call: Call, x: Value) -> Tensor:
    """Return the index of the first or of the last extreme along an axis."""
    value, axis = tensor(x), call.get("axis", 0)
    find = torch.argmax if call.node.operator == "ArgMax" else torch.argmin
    if not call.get("select_last_index", 0):
        return find(value, axis, keepdim=bool(call.get("keepdims", 1)))
    return value.shape[axis] - 1 - find(value.flip(axis), axis, keepdim=bool(call.get("keepdims", 1)))


@operator("CumSum", "CumProd")
def cumulative(call: Call, x: Value, axis: Value) -> Tensor:
    """Return cumulative sums or products; with `exclusive`, without the element itself."""
    value, along = tensor(x), int(call.number(axis, 0, "an axis"))
    total = torch.cumsum if call.node.operator == "CumSum" else torch.cumprod
    neutral = 0 if call.node.operator == "CumSum" else 1
    value = value.flip(along) if call.get("reverse", 0) else value
    result = total(value, along, dtype=value.dtype)
    if call.get("exclusive", 0):
        first = torch.full_like(result.narrow(along, 0, 1), neutral)
        result = torch.cat([first, result.narrow(along, 0, result.shape[along] - 1)], along)
    return result.flip(along) if call.get("reverse", 0) else result


@operator("TopK")
def top_k(call: Call, x: Value, k: Value | None = None) -> list[Tensor]:
    """Return the k largest or smallest elements along an axis, sorted; equal elements keep their order."""
    value, axis = tensor(x), call.get("axis", -1)
    count = int(call.number(k, call.get("k", 1), "a count"))
    found: Any = torch.sort(value, dim=axis, descending=bool(call.get("largest", 1)), stable=True)
    return [found.values.narrow(axis, 0, count), found.indices.narrow(axis, 0, count)]
