"""Convolutions in forms that IREE accepts, and their backward as matrix products and a convolution.

torch-mlir 20261001 lowers `convolution_backward` itself, but it refuses groups. Its weight gradient runs at a tenth of
eager's speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import is_known
from irongrad.operators.decompositions.windows import each

aten = torch.ops.aten

# The backward stays one operator for the passes in these dtypes only: the sums of Winograd's transforms need their
# precision.
KEPT = (torch.float32, torch.float64)


class Geometry(NamedTuple):
    """How a convolution moves over its input.

    Attributes:
        stride: one number for each spatial dimension.
        padding: zeros on either side, one number for each spatial dimension.
        dilation: one number for each spatial dimension.
        groups: the number of channel groups.
    """

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @classmethod
    def of(
        cls, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> Geometry:
        """Build a geometry from ATen's arguments, in which one number may stand for all dimensions."""
        dims = weight.ndim - 2
        return cls(each(stride, dims), each(padding, dims), each(dilation, dims), groups)

    def reach(self, weight: torch.Tensor) -> list[int]:
        """The distance between the first and the last position of the kernel, for each spatial dimension."""
        return [dil * (kernel - 1) for dil, kernel in zip(self.dilation, weight.shape[2:], strict=True)]


@decomposes(aten.convolution.default)
def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Rewrite the forms that torch-mlir or IREE cannot compile.

    A transposed convolution is the input gradient of a convolution (Dumoulin and Visin, arXiv:1603.07285, chapter 4).
    """
    geometry = Geometry.of(weight, stride, padding, dilation, groups)
    if transposed:
        sizes = _transposed_sizes(x, weight, geometry, each(output_padding, weight.ndim - 2))
        if _is_kept(x, sizes, weight, geometry):
            like = x.new_zeros([x.shape[0], weight.shape[1] * groups, *sizes])
            out, _ = _kept_backward(x, like, weight, geometry, [True, False])
        else:
            out = input_gradient(x, sizes, weight, geometry)
        return out if bias is None else out + bias.reshape(-1, *[1] * len(sizes))
    if not x.numel():
        return x.new_zeros([x.shape[0], weight.shape[0], *_sizes(x.shape[2:], weight, geometry)])
    if weight.ndim == 5:
        return _in_three_dimensions(x, weight, bias, geometry)
    return _crop_unread(x, weight, bias, geometry)


def _crop_unread(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
    """Crop the end of the padded input that the stride never reads.

    IREE 3.13.0 fails on an unread end if the output has one position ("inferred input/output operand #1 has shape's
    dimension #2 to be 4, but found 3").
    """
    stride, padding, dilation, groups = geometry
    unread = [
        (size + 2 * pad - reach - 1) % step
        for size, pad, reach, step in zip(x.shape[2:], padding, geometry.reach(weight), stride, strict=True)
    ]
    if not any(unread):
        return NotImplemented
    pads = [p for pad, rest in zip(reversed(padding), reversed(unread), strict=True) for p in (pad, pad - rest)]
    zeros = [0] * len(stride)
    return aten.convolution.default(zero_padded(x, pads), weight, bias, stride, zeros, dilation, False, zeros, groups)


def _in_three_dimensions(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
) -> torch.Tensor:
    """Write a three-dimensional convolution as a two-dimensional one.

    torch-mlir 20261001 aborts the process on three dimensions (an assertion in its `linalg.conv_3d` lowering).
    """
    stride, padding, dilation, groups = _plane_geometry(geometry)
    depth = _sizes(x.shape[2:], weight, geometry)[0]
    shared = (bias, stride, padding, dilation, False, [0, 0], groups)
    out = aten.convolution.default(_planes(x, depth, weight.shape[2], geometry), weight.flatten(1, 2), *shared)
    return out.unflatten(0, (x.shape[0], depth)).transpose(1, 2)


def _planes(x: torch.Tensor, depth: int, kernel: int, geometry: Geometry) -> torch.Tensor:
    """The input of the two-dimensional convolution that computes the `depth` output planes of a three-dimensional one.

    The input planes that the kernel reads become channels: [N * depth, C * depth of the kernel, H, W].
    """
    step, pad, dil = geometry.stride[0], geometry.padding[0], geometry.dilation[0]
    padded = zero_padded(x, [0, 0, 0, 0, pad, pad])
    starts = range(0, kernel * dil, dil)
    read = torch.stack([_sliced(padded, [slice(k, k + (depth - 1) * step + 1, step)]) for k in starts], 2)
    return read.movedim(3, 1).flatten(0, 1).flatten(1, 2)


def _backward_in_three_dimensions(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, mask: Sequence[bool]
) -> list[Any]:
    """The gradients of the input and of the weight: those of the convolution of planes, whose form is chosen later."""
    depth, kernel = grad.shape[2], weight.shape[2]
    planes, of_planes = _planes(x, depth, kernel, geometry), grad.transpose(1, 2).flatten(0, 1)
    grad_planes, grad_weight = _kept_backward(of_planes, planes, weight.flatten(1, 2), _plane_geometry(geometry), mask)
    return [
        _added_planes(grad_planes, x, depth, kernel, geometry) if mask[0] else None,
        grad_weight.reshape(weight.shape) if mask[1] else None,
    ]


def _added_planes(grad: torch.Tensor, x: torch.Tensor, depth: int, kernel: int, geometry: Geometry) -> torch.Tensor:
    """The gradient of `x` [N, C, D, H, W], of whose `_planes` the gradient is `grad`."""
    step, pad, dil = geometry.stride[0], geometry.padding[0], geometry.dilation[0]
    read = grad.unflatten(1, (x.shape[1], kernel)).unflatten(0, (x.shape[0], depth))  # [N, depth, C, kernel, H, W]
    parts = [_insert_zeros(part.movedim(1, 2), [step, 1, 1]) for part in read.unbind(3)]
    before = [k * dil - pad for k in range(kernel)]
    placed = [
        zero_padded(part, [0, 0, 0, 0, start, x.shape[2] - start - part.shape[2]])
        for part, start in zip(parts, before, strict=True)
    ]
    return reduce(torch.add, placed)


def _plane_geometry(geometry: Geometry) -> Geometry:
    return Geometry(geometry.stride[1:], geometry.padding[1:], geometry.dilation[1:], geometry.groups)


def _sizes(sizes: Sequence[int], weight: torch.Tensor, geometry: Geometry) -> list[int]:
    """The spatial sizes of a convolution's output, from the spatial sizes of its input."""
    dims = zip(sizes, geometry.padding, geometry.reach(weight), geometry.stride, strict=True)
    return [(size + 2 * pad - reach - 1) // step + 1 for size, pad, reach, step in dims]


def _transposed_sizes(
    x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, output_padding: Sequence[int]
) -> list[int]:
    """The spatial sizes of a transposed convolution's output."""
    dims = zip(x.shape[2:], geometry.padding, geometry.reach(weight), geometry.stride, output_padding, strict=True)
    return [(size - 1) * step - 2 * pad + reach + extra + 1 for size, pad, reach, step, extra in dims]


@decomposes(aten.convolution_backward.default)
def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of input, weight and bias (Dumoulin and Visin, arXiv:1603.07285, for the input's).

    Shapes: `grad` [N, O, *out], `x` [N, C, *in], `weight` [O, C / groups, *kernel]. A transposed convolution is the
    input gradient of a convolution, so `grad` and `x` swap roles in its own gradients.
    """
    geometry = Geometry.of(weight, stride, padding, dilation, groups)
    out, image = (x, grad) if transposed else (grad, x)
    kept = _is_kept(out, image.shape[2:], weight, geometry)
    if kept and not transposed and not output_mask[2] and weight.ndim < 5:
        return NotImplemented  # type: ignore[no-any-return]
    grad_x = grad_weight = grad_bias = None
    if output_mask[2]:
        grad_bias = aten.sum.dim_IntList(grad, [0, *range(2, grad.ndim)])
    if kept and not transposed:
        return *_kept_backward(grad, x, weight, geometry, output_mask), grad_bias
    if output_mask[0] and transposed:
        grad_x = _gradient_of_transposed(grad, x, weight, geometry)
    elif output_mask[0]:
        grad_x = input_gradient(grad, x.shape[2:], weight, geometry)
    if output_mask[1]:
        if kept:
            grad_weight = _kept_backward(out, image, weight, geometry, [False, True])[1]
        else:
            grad_weight = weight_gradient(out, image, weight.shape, geometry)
    return grad_x, grad_weight, grad_bias


def _is_kept(out: torch.Tensor, sizes: Sequence[int], weight: torch.Tensor, geometry: Geometry) -> bool:
    """Whether the backward stays one operator, so that `irongrad.passes.graph.convolutions` chooses its form.

    In three dimensions that is the backward of its planes. `out` has the shape of the convolution's output, and `sizes`
    are the spatial sizes of its input. A transposed convolution swaps the two. It may also have positions that no
    element of `out` contributes to: then the sizes do not match, and the backward is decomposed.
    """
    if not all(map(is_known, out.shape)):
        return False
    if weight.ndim not in (3, 4, 5) or not out.numel() or not weight.numel() or not all(sizes) or out.dtype not in KEPT:
        return False
    return _sizes(sizes, weight, geometry) == list(out.shape[2:])


def _kept_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, mask: Sequence[bool]
) -> list[Any]:
    """The gradients of the input and of the weight as one operator; `mask` tells which are needed."""
    if not any(mask[:2]):
        return [None, None]
    if weight.ndim == 5:
        return _backward_in_three_dimensions(grad, x, weight, geometry, mask)
    stride, padding, dilation, groups = geometry
    shared = (None, stride, padding, dilation, False, [0] * len(stride), groups, [*mask[:2], False])
    return list(aten.convolution_backward.default(grad, x, weight, *shared)[:2])


def _gradient_of_transposed(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """The input gradient of a transposed convolution: a convolution, cropped to the size of `x`.

    The cropped positions come from an output padding that is at least the stride.
    """
    stride, padding, dilation, groups = geometry
    zeros = [0] * len(stride)
    out = aten.convolution.default(grad, weight, None, stride, padding, dilation, False, zeros, groups)
    return _sliced(out, [slice(0, size, 1) for size in x.shape[2:]])


def input_gradient(grad: torch.Tensor, sizes: Sequence[int], weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Compute the input gradient of a convolution.

    The output gradient, with zeros inserted for the stride, is convolved with the flipped and transposed weight.

    Args:
        grad: the output gradient, [N, O, *out].
        sizes: the spatial sizes of the input.
        weight: [O, C / groups, *kernel].
        geometry: of the convolution.

    Returns:
        The input gradient, [N, C, *sizes].
    """
    stride, padding, dilation, groups = geometry
    dilated = _insert_zeros(grad, stride)
    pads: list[int] = []
    for size, out, reach, pad in reversed(
        list(zip(sizes, dilated.shape[2:], geometry.reach(weight), padding, strict=True))
    ):
        pads += [reach - pad, size + pad - out]
    spatial = list(range(2, weight.ndim))
    grouped = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    transposed = grouped.reshape(-1, weight.shape[0] // groups, *weight.shape[2:]).flip(spatial)
    ones, zeros = [1] * len(spatial), [0] * len(spatial)
    return aten.convolution.default(
        zero_padded(dilated, pads), transposed, None, ones, zeros, dilation, False, zeros, groups
    )


def _insert_zeros(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Insert `stride` - 1 zeros between neighbours along each spatial dimension."""
    for dim, step in enumerate(stride, start=2):
        if step == 1 or x.shape[dim] == 1:
            continue
        size = x.shape[dim]
        apart = zero_padded(x.unsqueeze(dim + 1), [0, 0] * (x.ndim - dim - 1) + [0, step - 1])
        x = apart.flatten(dim, dim + 1).narrow(dim, 0, (size - 1) * step + 1)
    return x


def zero_padded(x: torch.Tensor, pads: Sequence[int]) -> torch.Tensor:
    """Pad with zeros, with `pads` in the order of `constant_pad_nd`.

    Negative pads become slices, because torch-mlir 20261001 does not lower them.
    """
    pairs = list(zip(pads[::2], pads[1::2], strict=True))
    cuts = [(max(-before, 0), max(-after, 0)) for before, after in pairs]
    if any(any(cut) and x.shape[-dim] <= sum(cut) for dim, cut in enumerate(cuts, start=1)):  # no input is left
        sizes = [size + sum(pair) for size, pair in zip(reversed(x.shape), pairs, strict=False)]
        return x.new_zeros([*x.shape[: -len(pairs)], *reversed(sizes)])
    for dim, (start, end) in enumerate(cuts, start=1):
        if start or end:
            x = x.narrow(-dim, start, x.shape[-dim] - start - end)
    positive = [max(p, 0) for p in pads]
    return aten.constant_pad_nd.default(x, positive) if any(positive) else x


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """Compute the weight gradient of a convolution: sums of output gradients times the inputs that each weight read.

    Each kernel row is one matrix product, [O, positions] times [positions, C * width of the kernel]. Gathering along
    the width alone copies the input a few times. Gathering whole windows would copy it nine times.

    Args:
        grad: the output gradient, [N, O, *out].
        x: the input, [N, C, *in].
        shape: the shape of the weight, [O, C / groups, *kernel].
        geometry: of the convolution.

    Returns:
        The weight gradient, of `shape`.
    """
    if not grad.numel():
        return grad.new_zeros(shape)
    if len(shape) == 5:
        planes = _planes(x, grad.shape[2], shape[2], geometry)
        grad_planes = grad.transpose(1, 2).flatten(0, 1)
        plane_shape = [shape[0], shape[1] * shape[2], *shape[3:]]
        return weight_gradient(grad_planes, planes, plane_shape, _plane_geometry(geometry)).reshape(shape)
    stride, padding, dilation, groups = geometry
    out, kernel = grad.shape[2:], shape[2:]
    padded = zero_padded(x, [p for pad in reversed(padding) for p in (pad, pad)])
    left = grad.transpose(0, 1).reshape(groups, shape[0] // groups, -1)
    steps = [
        [slice(k * dil, k * dil + (size - 1) * step + 1, step) for k in range(count)]
        for size, count, step, dil in zip(out, kernel, stride, dilation, strict=True)
    ]
    rows = []
    for places in itertools.product(*steps[:-1]):
        read = torch.stack([_sliced(padded, (*places, column)) for column in steps[-1]])  # [width, N, C, *out]
        read = read.unflatten(2, (groups, -1)).movedim((2, 0, 3), (0, -1, -2))  # [groups, N, *out, C / groups, width]
        right = read.reshape(groups, left.shape[-1], -1)
        rows.append(_product(left, right))
    stacked = torch.stack(rows, dim=2)  # [groups, O / groups, rows of the kernel, C / groups * width]
    split = stacked.unflatten(3, (-1, kernel[-1])).movedim(3, 2)
    return split.reshape(shape)


def _sliced(x: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    for dim, part in enumerate(slices, start=2):
        if (part.start, part.stop, part.step) != (0, x.shape[dim], 1):
            x = aten.slice.Tensor(x, dim, part.start, part.stop, part.step)
    return x


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A batched matrix product. A batch of one becomes a plain product, which IREE compiles to faster code."""
    if left.shape[0] == 1:
        return aten.mm.default(left.squeeze(0), right.squeeze(0)).unsqueeze(0)
    return aten.bmm.default(left, right)
