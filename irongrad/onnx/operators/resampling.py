"""Resize, and sampling on grids.

Along one dimension, a resize computes each new element as a weighted sum of a few old ones. Their positions and weights
are known without data (the ONNX operator's specification, "Resize"). So one formula covers every mode, also those that
PyTorch lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from irongrad.onnx.registry import Call, Static, Value, operator, tensor


@operator("Resize")
def resize(call: Call, x: Value, *given: Value | None) -> Tensor:
    """Resize by scales or to sizes, along some axes."""
    value = tensor(x)
    if call.opset < 11:
        return _resized(call, value, call.ints(given[0], "scales"), None, list(range(value.ndim)), None)
    roi, scales, sizes = (*given, *[None] * 3)[:3]
    axes = [a % value.ndim for a in call.get("axes") or range(value.ndim)]
    numbers = call.ints(scales, "scales") if scales is not None else []
    wanted = call.ints(sizes, "sizes") if sizes is not None and not numbers else None
    return _resized(call, value, numbers or None, wanted, axes, call.ints(roi, "a region") if roi is not None else None)


@operator("Upsample")
def upsample(call: Call, x: Value, scales: Value | None = None) -> Tensor:
    """Resize by scales; Upsample is the operator that Resize replaced."""
    value = tensor(x)
    factors = call.ints(scales, "scales") if scales is not None else call.get("scales")
    return _resized(call, value, list(factors), None, list(range(value.ndim)), None)


def _resized(
    call: Call, x: Tensor, scales: list[float] | None, sizes: list[int] | None, axes: list[int], roi: list[float] | None
) -> Tensor:
    if sizes is not None:
        scales = [1.0 if s == x.shape[a] else s / x.shape[a] for s, a in zip(sizes, axes, strict=True)]
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = (min if policy == "not_larger" else max)(scales)
            scales, sizes = [one] * len(axes), [math.floor(one * x.shape[a] + 0.5) for a in axes]
    assert scales is not None
    crops = call.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    for i, (axis, scale) in enumerate(zip(axes, scales, strict=True)):
        size = x.shape[axis]
        if scale == 1 and not crops:
            continue  # also a size that varies
        if not isinstance(size, int):
            raise call.node.unsupported(f"resizes dimension {axis}, whose size varies, which is not supported")
        new_size = sizes[i] if sizes is not None else math.floor(size * scale)
        region = (roi[i], roi[i + len(axes)]) if roi else (0.0, 1.0)
        x = _along(call, x, axis, _Axis(size, new_size, float(scale), region))
    return x


class _Axis:
    """The resizing of one dimension.

    Attributes:
        size: the old size.
        new_size: the new size.
        scale: the scale of the resize.
        region: the start and the end of the cropped region, as fractions of the old size.
    """

    def __init__(self, size: int, new_size: int, scale: float, region: tuple[float, float]) -> None:
        self.size, self.new_size, self.scale, self.region = size, new_size, scale, region

    def places(self, mode: str) -> Static:
        """Return the position in the old dimension of each element of the new one."""
        i, n, m, s = np.arange(self.new_size, dtype=np.float64), self.size, self.new_size, self.scale
        start, end = self.region
        match mode:
            case "half_pixel":
                return (i + 0.5) / s - 0.5
            case "half_pixel_symmetric":
                adjustment = m / (s * n)
                center = n / 2
                return center * (1 - adjustment) + (i + 0.5) / s - 0.5
            case "pytorch_half_pixel":
                return (i + 0.5) / s - 0.5 if m > 1 else np.zeros(m)
            case "align_corners":
                return i * (n - 1) / (s * n - 1) if m > 1 else np.zeros(m)
            case "asymmetric":
                return i / s
            case _:  # tf_crop_and_resize
                if m > 1:
                    return start * (n - 1) + i * (end - start) * (n - 1) / (m - 1)
                return np.full(m, 0.5 * (start + end) * (n - 1))


def _along(call: Call, x: Tensor, axis: int, about: _Axis) -> Tensor:
    default = "half_pixel" if call.opset >= 11 and call.node.operator == "Resize" else "asymmetric"
    transformation = call.get("coordinate_transformation_mode", default)
    places = about.places(transformation)
    mode = call.get("mode", "nearest")
    if mode == "nearest":
        rounding = call.get("nearest_mode", "round_prefer_floor" if call.opset >= 11 else "floor")
        index = np.clip(_ROUNDINGS[rounding](places), 0, about.size - 1).astype(np.int64)
        made = x.index_select(axis, torch.from_numpy(index))
    else:
        index, weights = _taps(call, mode, places, about)
        shape = [1] * x.ndim
        shape[axis] = about.new_size
        made = torch.zeros(())
        for column in range(index.shape[1]):
            taken = x.index_select(axis, torch.from_numpy(index[:, column].copy()))
            weight = torch.from_numpy(weights[:, column].copy()).to(x.dtype).reshape(shape)
            made = taken * weight if column == 0 else made + taken * weight
    if transformation == "tf_crop_and_resize":
        outside = torch.from_numpy((places < 0) | (places > about.size - 1))
        shape = [1] * x.ndim
        shape[axis] = about.new_size
        made = made.masked_fill(outside.reshape(shape), call.get("extrapolation_value", 0.0))
    return made


_ROUNDINGS: dict[str, Callable[[Static], Any]] = {
    "round_prefer_floor": lambda p: np.ceil(p - 0.5),
    "round_prefer_ceil": lambda p: np.floor(p + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _taps(call: Call, mode: str, places: Static, about: _Axis) -> tuple[Static, Static]:
    """Return the indices and the weights of the old elements at each position."""
    shrink = min(about.scale, 1.0) if call.get("antialias", 0) else 1.0
    reach, weight = (1, _linear) if mode == "linear" else (2, _cubic(call.get("cubic_coeff_a", -0.75)))
    start = math.floor(-reach / shrink) + 1
    index = np.floor(places).astype(np.int64)[:, None] + np.arange(start, 2 - start)
    weights = weight((index - places[:, None]) * shrink)
    if call.get("exclude_outside", 0):
        weights = np.where((index < 0) | (index >= about.size), 0.0, weights)
    # Positions beyond the border read the border.
    return np.clip(index, 0, about.size - 1), weights / weights.sum(1, keepdims=True)


def _linear(distance: Static) -> Static:
    return np.maximum(0.0, 1.0 - np.abs(distance))


def _cubic(a: float) -> Callable[[Static], Static]:
    """Return the weights of cubic interpolation.

    Source: R. Keys, "Cubic convolution interpolation for digital image processing", 1981, equation 4 with `a` free.
    """

    def weight(distance: Static) -> Static:
        d = np.abs(distance)
        near = (a + 2) * d**3 - (a + 3) * d**2 + 1
        far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))

    return weight


@operator("GridSample")
def grid_sample(call: Call, x: Value, grid: Value) -> Tensor:
    """Sample an image at positions that are data."""
    modes = {"linear": "bilinear", "cubic": "bicubic"}
    mode = call.get("mode", "linear")
    corners = bool(call.get("align_corners", 0))
    padding = call.get("padding_mode", "zeros")
    return functional.grid_sample(tensor(x), tensor(grid), modes.get(mode, mode), padding, corners)


@operator("AffineGrid")
def affine_grid(call: Call, theta: Value, size: Value) -> Tensor:
    """Return sampling positions for GridSample, by an affine map."""
    sizes: Sequence[int] = call.ints(size, "a size")
    return functional.affine_grid(tensor(theta), list(sizes), bool(call.get("align_corners", 0)))
