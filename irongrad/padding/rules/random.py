"""Random draws: a true element gets the number that it gets without padding."""

from __future__ import annotations

from irongrad.operators.random import numbered
from irongrad.padding.layout import Layout, layout_of, solid
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten

# Those that draw for something else than the elements of their result, in its order.
_OTHERS = frozenset({aten.multinomial.default, aten.randperm.default, aten.randperm.generator})


def random(call: Call) -> Padded | list[Padded]:
    """The operator itself, its elements numbered as without padding; the generator counts by those numbers."""
    if call.operator in _OTHERS:
        raise NoRule("draws an order or a choice among elements of which some are padding")
    layout = _drawn(call)
    with numbered(call.padding.places(layout)):
        results = call.run()
    return [Padded(r, layout) for r in results] if isinstance(results, list | tuple) else Padded(results, layout)


def _drawn(call: Call) -> Layout:
    tensors = [v for v in call.arguments.values() if isinstance(v, Padded)]
    layout = call.broadcast(*tensors) if tensors else layout_of(call["size"])
    return tuple(solid(dim) for dim in layout)
