"""Padding rules of sorting operators: padding sorts to the end."""

from __future__ import annotations

from typing import Any

import torch

from irongrad.padding.layout import dim_of, size_of, solid
from irongrad.padding.padded import HIGHEST, LOWEST, Padded
from irongrad.padding.registry import Call, aten, rule
from irongrad.padding.rules.reductions import in_order, reduced


@rule(aten.sort.default, aten.sort.stable)
def _sort(call: Call) -> list[Padded]:
    value = call["self"]
    in_order(value, call["dim"])
    filled = call.padding.fill(value, LOWEST if call["descending"] else HIGHEST, call["dim"])
    return [Padded(r, tuple(map(solid, value.layout))) for r in call.run(self=filled)]


@rule(aten.topk.default)
def _topk(call: Call) -> list[Padded]:
    value = call["self"]
    in_order(value, call["dim"])
    if value.ndim:
        call.padding.need(value.layout[call["dim"]], call["k"])
    filled = call.padding.fill(value, LOWEST if call["largest"] else HIGHEST, call["dim"])
    layout = [solid(d) for d in value.layout]
    if value.ndim:
        layout[call["dim"]] = dim_of(call["k"])
    return [Padded(r, tuple(layout)) for r in call.run(self=filled)]


@rule(aten.bucketize.Tensor)
def _bucketize(call: Call) -> Padded:
    """Count the boundaries below each element.

    Padding boundaries get the largest value, so they are below no element. The clamp leaves out those that equal one.
    """
    boundaries: Padded = call["boundaries"]
    in_order(boundaries, 0)
    places = call.run(boundaries=call.padding.fill(boundaries, HIGHEST))
    count: Any = call.padding.count(boundaries)
    return Padded(places.clamp(max=count) if boundaries.padded() else places, call["self"].layout)


@rule(aten.median.dim)
def _median(call: Call) -> list[Padded]:
    """The median of the true elements; of two middle elements, the lower."""
    value = call["self"]
    d = call["dim"] % value.ndim
    in_order(value, d)
    values, places = torch.sort(call.padding.fill(value, HIGHEST, d), stable=True, dim=d)
    size: Any = call.padding.sizes.true(size_of(value.layout[d]))
    middle = torch.as_tensor((size - 1) // 2).reshape(1)
    rows = [r.index_select(d, middle) for r in (values, places)]
    return [Padded(r if call["keepdim"] else r.squeeze(d), reduced(value, [d], keepdim=call["keepdim"])) for r in rows]
