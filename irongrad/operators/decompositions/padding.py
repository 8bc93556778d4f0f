"""Constant, reflection and replication padding, and their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from irongrad.graph.recorder import Operator
from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.taps import Taps, apply_each, apply_each_transposed

aten = torch.ops.aten


@decomposes(aten.constant_pad_nd.default)
def _constant_pad(x: torch.Tensor, pad: Sequence[int], value: float = 0) -> torch.Tensor:
    """Turn negative pads into slices; torch-mlir 20261001 does not do so."""
    if all(p >= 0 for p in pad):
        return NotImplemented
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        start, end = max(-before, 0), x.shape[-dim] - max(-after, 0)
        if (start, end) != (0, x.shape[-dim]):
            x = x.narrow(-dim, start, end - start)
    return aten.constant_pad_nd.default(x, [max(p, 0) for p in pad], value)


def _padding(dims: int, place: Callable[[int, int], int], forward: Operator, backward: Operator) -> None:
    """Register a padding of the last `dims` dimensions.

    `place(i, size)` is the index of the input that the output at i reads; i = 0 is the first place after the padding.
    """

    def maps(sizes: Sequence[int], pad: Sequence[int]) -> list[Taps]:
        pairs = reversed(list(zip(pad[::2], pad[1::2], strict=True)))
        return [
            Taps.gather((place(i, size) for i in range(-before, size + after)), size)
            for size, (before, after) in zip(sizes[-dims:], pairs, strict=True)
        ]

    @decomposes(forward)
    def pad(x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
        return apply_each(x, maps(x.shape, padding))

    @decomposes(backward)
    def pad_backward(grad: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
        return apply_each_transposed(grad, maps(x.shape, padding))


def _reflected(place: int, size: int) -> int:
    """Reflect a place at one edge, once: padding is shorter than the input."""
    return size - 1 - abs(size - 1 - abs(place))


def _nearest(place: int, size: int) -> int:
    return min(max(place, 0), size - 1)


_padding(1, _reflected, aten.reflection_pad1d.default, aten.reflection_pad1d_backward.default)
_padding(2, _reflected, aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default)
_padding(3, _reflected, aten.reflection_pad3d.default, aten.reflection_pad3d_backward.default)
_padding(1, _nearest, aten.replication_pad1d.default, aten.replication_pad1d_backward.default)
_padding(2, _nearest, aten.replication_pad2d.default, aten.replication_pad2d_backward.default)
_padding(3, _nearest, aten.replication_pad3d.default, aten.replication_pad3d_backward.default)
