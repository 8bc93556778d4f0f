"""Padding rules of convolutions: zeros in place of padding, as beyond the edge of the input."""

from __future__ import annotations

from irongrad.padding.layout import Layout, layout_of, solid
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, aten, rule


def image(call: Call, value: Padded, spatial: int) -> Layout:
    """The layout of a result whose last `spatial` dimensions are windows over those of `value`.

    Raises:
        NoRule: the padding of one of these dimensions lies between true elements.
    """
    if any(len(dim) > 1 for dim in value.layout[value.ndim - spatial :]):
        raise NoRule("slides over a dimension whose padding lies between true elements")
    sizes = call.made[0] or ()
    kept = [solid(dim) for dim in value.layout[: value.ndim - spatial]]
    return (*kept, *layout_of(sizes[len(kept) :]))


@rule(aten.convolution.default)
def _convolution(call: Call) -> Padded:
    value = call["input"]
    spatial = call["weight"].ndim - 2
    if value.padded(1):
        raise NoRule("sums over a padded channel dimension")
    filled = call.padding.fill(value, 0, list(range(value.ndim - spatial, value.ndim)))
    batch, _, *windows = image(call, value, spatial)
    channels = layout_of((call.made[0] or ())[1:2])
    return Padded(call.run(input=filled), (batch, *channels, *windows))


@rule(aten.convolution_backward.default)
def _convolution_backward(call: Call) -> list[Padded | None]:
    """Zero the padding of both operands, because the gradient of the weight sums over all their elements."""
    if call["input"].padded(1):
        raise NoRule("sums over a padded channel dimension")
    call.like("grad_output", (call["input"].layout[0], *call["grad_output"].layout[1:]))
    results = call.run(**call.zeros("grad_output", "input"))
    weight = call["weight"].layout
    layouts = (call["input"].layout, weight, weight[1:2] if call["transposed"] else weight[:1])
    return [
        Padded(r, tuple(map(solid, layout))) if r is not None else None
        for r, layout in zip(results, layouts, strict=True)
    ]
