"""Padding rules of operators that make a tensor from a size."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from irongrad.padding.layout import layout_of
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, aten, rule


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
)
def _constant(call: Call) -> Padded:
    layout = layout_of(call["size"], uniform=True)
    value = call.arguments.get("fill_value")
    if not isinstance(value, sympy.Basic):
        return Padded(call.run(), layout)
    number: Any = call.padding.sizes.true(value)
    return Padded(torch.zeros_like(call.run(fill_value=0)) + number, layout)


@rule(aten.scalar_tensor.default)
def _scalar(call: Call) -> Padded:
    number: Any = call.padding.sizes.true(call["s"])
    return Padded(number.to(call["dtype"] or torch.get_default_dtype()), ())


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(call: Call) -> Padded:
    """Count from the true start by the true step; numbers after the true end are padding."""
    (size,) = call.made[0] or ()
    start: Any = call.padding.sizes.true(call.arguments.get("start") or 0)
    step: Any = call.padding.sizes.true(call.arguments.get("step") or 1)
    exact = torch.int64 if isinstance(start, int) and isinstance(step, int) else None
    dtype = call["dtype"] or exact or torch.get_default_dtype()
    steps = torch.arange(call.padding.sizes.bucket(size))
    return Padded((steps * step + start).to(dtype), layout_of([size]))


@rule(aten.eye.default, aten.eye.m)
def _eye(call: Call) -> Padded:
    return Padded(call.run(), layout_of(call.made[0] or ()))
