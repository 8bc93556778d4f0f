"""Interpolation to another size, and its backward: a table of weights for each dimension (ATen/native/UpSample.h)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from irongrad.graph.recorder import Operator
from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.taps import Row, Taps, apply_each, apply_each_transposed

aten = torch.ops.aten


@dataclass(frozen=True)
class Axis:
    """The sizes of one dimension.

    Attributes:
        size: the number of inputs.
        count: the number of outputs.
        align_corners: whether the centres of the outermost inputs and outputs coincide; if not, their outer edges do.
        scale: outputs per input, if it is not `count` / `size`.
        dtype: the dtype of the input.
    """

    size: int
    count: int
    align_corners: bool
    scale: float | None
    dtype: torch.dtype

    @property
    def step(self) -> float:
        """The distance between neighbouring outputs, in inputs."""
        if self.align_corners:
            return (self.size - 1) / (self.count - 1) if self.count > 1 else 0.0
        return 1 / self.scale if self.scale else self.size / self.count

    def sources(self) -> list[float]:
        """Return the position of each output in the input; 0 is the centre of the first input."""
        shift = 0.0 if self.align_corners else 0.5
        return [(i + shift) * self.step - shift for i in range(self.count)]


Resampling = Callable[[Axis], Taps]


def _nearest(axis: Axis, *, exact: bool = False) -> Taps:
    """Take the nearest input. As in ATen, its position is computed in the input's precision and rounded to float32.

    The precision decides which input is nearest.
    """
    number = np.float64 if axis.dtype == torch.float64 else np.float32
    step = number(1 / axis.scale) if axis.scale else number(axis.size) / number(axis.count)
    if exact:
        # ATen's `step * (i + 0.5) - 0.5` is a fused multiply-add, rounded once.
        sources = [number(float(step) * (i + 0.5) - 0.5) + number(0.5) for i in range(axis.count)]
    else:
        sources = [number(i) * step for i in range(axis.count)]
    return Taps.gather([min(math.floor(np.float32(s)), axis.size - 1) for s in sources], axis.size)


def _nearest_of_whole(axis: Axis) -> Taps:
    """Take the nearest input in two dimensions.

    There ATen ignores a fractional scale that gives the same or twice the size.
    """
    return _nearest(replace(axis, scale=None) if axis.count in (axis.size, 2 * axis.size) else axis)


def _nearest_backward(axis: Axis, *, exact: bool = False) -> Taps:
    """The weights of ATen's backward, which is in float32 for every dtype.

    In any number of dimensions it ignores the scales that `_nearest_of_whole` ignores in two.
    """
    axis = replace(axis, dtype=torch.float32)
    return _nearest(axis, exact=True) if exact else _nearest_of_whole(axis)


def _linear(axis: Axis) -> Taps:
    """Weight the two inputs around each output by distance; an output before the first input is the first input."""
    rows: list[Row] = []
    last = axis.size - 1
    for source in axis.sources():
        source = max(source, 0.0)
        first = min(int(source), last)
        weight = min(source - first, 1.0)
        rows.append(((first, 1.0),) if first == last else ((first, 1 - weight), (first + 1, weight)))
    return Taps(tuple(rows), axis.size)


def _cubic(axis: Axis) -> Taps:
    """Weight the four inputs around each output; an input beyond the edge is the one at the edge."""
    rows: list[Row] = []
    for source in axis.sources():
        first = math.floor(source) - 1
        near = ((p, cubic_kernel(source - p, -0.75)) for p in range(first, first + 4))
        rows.append(tuple((min(max(p, 0), axis.size - 1), weight) for p, weight in near))
    return Taps(tuple(rows), axis.size)


def _antialiased(axis: Axis, *, kernel: Callable[[float], float], reach: float) -> Taps:
    """Weight inputs by the kernel, stretched to the distance of the outputs and normalised.

    The method is that of Pillow's resampling (UpSampleKernel.cpp). The kernel is never narrower than for distance 1.
    """
    width = max(axis.step, 1.0)
    rows: list[Row] = []
    for i in range(axis.count):
        centre = axis.step * (i + 0.5)
        begin = max(int(centre - reach * width + 0.5), 0)
        end = min(int(centre + reach * width + 0.5), axis.size)
        weights = [kernel((p - centre + 0.5) / width) for p in range(begin, end)]
        total = sum(weights)
        rows.append(tuple((p, weight / total) for p, weight in enumerate(weights, start=begin)))
    return Taps(tuple(rows), axis.size)


def _triangle(x: float) -> float:
    """The kernel of linear interpolation."""
    return max(1 - abs(x), 0.0)


def cubic_kernel(x: float, a: float) -> float:
    """Return the cubic convolution kernel with the parameter `a`, at the distance `x`.

    Keys, "Cubic convolution interpolation for digital image processing", IEEE Trans. ASSP 29, 1981.
    """
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def _lanczos(x: float) -> float:
    """sinc(x) sinc(x / 3) for |x| < 3, else 0 (C. Duchon, "Lanczos filtering in one and two dimensions", 1979)."""

    def sinc(y: float) -> float:
        return math.sin(math.pi * y) / (math.pi * y) if y else 1.0

    return sinc(x) * sinc(x / 3) if abs(x) < 3 else 0.0


def _register(forward: Operator, backward: Operator, resampling: Resampling, transposed: Resampling) -> None:
    """Register operators without an argument `align_corners`; the backward uses the weights of `transposed`."""

    @decomposes(forward)
    def upsample(x: torch.Tensor, output_size: Sequence[int], *scales: float | None) -> torch.Tensor:
        """y[o] = sum of w[o, i] x[i], one dimension after the other: [..., sizes] -> [..., *output_size]."""
        return apply_each(x, _maps(resampling, x.dtype, x.shape, output_size, False, scales))

    @decomposes(backward)
    def upsample_backward(
        grad: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
    ) -> torch.Tensor:
        """dx[i] = sum of w[o, i] dy[o], with the weights of `transposed`: [..., *output_size] -> `input_size`."""
        return apply_each_transposed(grad, _maps(transposed, grad.dtype, input_size, output_size, False, scales))


def _register_aligned(forward: Operator, backward: Operator, resampling: Resampling) -> None:
    """Register operators with an argument `align_corners`."""

    @decomposes(forward)
    def upsample(
        x: torch.Tensor, output_size: Sequence[int], align_corners: bool, *scales: float | None
    ) -> torch.Tensor:
        """y[o] = sum of w[o, i] x[i], one dimension after the other: [..., sizes] -> [..., *output_size]."""
        return apply_each(x, _maps(resampling, x.dtype, x.shape, output_size, align_corners, scales))

    @decomposes(backward)
    def upsample_backward(
        grad: torch.Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> torch.Tensor:
        """dx[i] = sum of w[o, i] dy[o], with the weights of the forward: [..., *output_size] -> `input_size`."""
        maps = _maps(resampling, grad.dtype, input_size, output_size, align_corners, scales)
        return apply_each_transposed(grad, maps)


def _maps(
    resampling: Resampling,
    dtype: torch.dtype,
    sizes: Sequence[int],
    counts: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
) -> list[Taps]:
    padded_scales = [*scales, *[None] * (len(counts) - len(scales))]
    dims = zip(sizes[-len(counts) :], counts, padded_scales, strict=True)
    return [resampling(Axis(size, count, align_corners, scale, dtype)) for size, count, scale in dims]


_ALIGNED: Mapping[str, Resampling] = {
    "upsample_linear1d": _linear,
    "upsample_bilinear2d": _linear,
    "upsample_trilinear3d": _linear,
    "upsample_bicubic2d": _cubic,
    "_upsample_bilinear2d_aa": partial(_antialiased, kernel=_triangle, reach=1.0),
    "_upsample_bicubic2d_aa": partial(_antialiased, kernel=partial(cubic_kernel, a=-0.5), reach=2.0),
    "_upsample_lanczos2d_aa": partial(_antialiased, kernel=_lanczos, reach=3.0),
}
_NEAREST: Mapping[str, tuple[Resampling, Resampling]] = {
    "upsample_nearest1d": (_nearest, _nearest_backward),
    "upsample_nearest2d": (_nearest_of_whole, _nearest_backward),
    "upsample_nearest3d": (_nearest, _nearest_backward),
} | {
    f"_upsample_nearest_exact{dims}d": (partial(_nearest, exact=True), partial(_nearest_backward, exact=True))
    for dims in (1, 2, 3)
}


for _name, _resampling in _ALIGNED.items():
    _register_aligned(getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default, _resampling)
for _name, _pair in _NEAREST.items():
    _register(getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default, *_pair)
