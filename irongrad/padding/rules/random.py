"""The padding rule of random draws: a true element gets the same number as without padding."""

from __future__ import annotations

from irongrad.operators.random import numbered
from irongrad.padding.layout import Layout, layout_of, solid
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten

# Operators that do not draw a number for each element of their result in row-major order.
_OTHERS = frozenset({aten.multinomial.default, aten.randperm.default, aten.randperm.generator})


def random(call: Call) -> Padded | list[Padded]:
    """Run the operator with each element numbered as without padding; the generator counts by these numbers."""
    if call.operator in _OTHERS:
        raise NoRule("draws an order or a choice among elements, some of which are padding")
    layout = _result_layout(call)
    with numbered(call.padding.places(layout)):
        results = call.run()
    return [Padded(r, layout) for r in results] if isinstance(results, list | tuple) else Padded(results, layout)


def _result_layout(call: Call) -> Layout:
    tensors = [v for v in call.arguments.values() if isinstance(v, Padded)]
    layout = call.broadcast(*tensors) if tensors else layout_of(call["size"])
    return tuple(solid(dim) for dim in layout)
