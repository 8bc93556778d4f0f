"""Sorting: padding comes last."""

from __future__ import annotations

from irongrad.padding.layout import dim_of, solid
from irongrad.padding.padded import HIGHEST, LOWEST, Padded
from irongrad.padding.registry import Call, aten, rule
from irongrad.padding.rules.reductions import in_order


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
    filled = call.padding.fill(value, LOWEST if call["largest"] else HIGHEST, call["dim"])
    layout = [solid(d) for d in value.layout]
    if value.ndim:
        layout[call["dim"]] = dim_of(call["k"])
    return [Padded(r, tuple(layout)) for r in call.run(self=filled)]
