"""Elementwise functions: arithmetic, rounding, and the sign, fraction and exponent of a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from irongrad.operators.decompositions.registry import decomposes, uses_pytorch
from irongrad.operators.decompositions.series import in_floating_point

aten = torch.ops.aten

uses_pytorch(
    aten.lerp,
    aten.addcmul,
    aten.addcdiv,
    aten.rsub.Tensor,
    aten.sgn,
    aten.detach,
)


@decomposes(aten._neg_view.default)
def _neg_view(x: torch.Tensor) -> torch.Tensor:
    return -x


@decomposes(aten.rsub.Scalar)
def _rsub(x: torch.Tensor, other: float, alpha: float = 1) -> torch.Tensor:
    """PyTorch's decomposition turns the number into a tensor, which rounds it to float32 even for a float64 `x`."""
    x = x.to(torch.result_type(x, other))  # first: the negative may not fit in an integer dtype
    return (-x if alpha == 1 else x * -alpha) + other


@decomposes(aten.signbit.default)
def _signbit(x: torch.Tensor) -> torch.Tensor:
    """The reciprocal detects negative zero: torch-mlir 20261001 has no lowering that reads the bits of a float."""
    if not x.is_floating_point():
        return x < 0
    return (x < 0) | (1 / x < 0)


@decomposes(aten.copysign.Tensor)
def _copysign(size: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    size = in_floating_point(size).to(torch.result_type(in_floating_point(size), sign)).abs()
    return torch.where(torch.signbit(sign), -size, size)


@decomposes(aten.copysign.Scalar)
def _copysign_scalar(size: torch.Tensor, sign: float) -> torch.Tensor:
    size = in_floating_point(size).abs()
    return -size if math.copysign(1.0, sign) < 0 else size


@decomposes(aten.reciprocal.default)
def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    """Divide instead: torch-mlir 20261001 lowers a reciprocal with an assertion that its argument is not zero.

    IREE 3.13.0 duplicates that assertion until memory runs out, if it fuses a whole function of scalars.
    """
    return torch.full((), 1, dtype=torch.result_type(x, 1.0)) / x


@decomposes(aten.fmax.default)
def _fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The larger operand. If one operand is NaN, the result is the other one."""
    return torch.where((x >= y) | (y != y), x, y)


@decomposes(aten.fmin.default)
def _fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smaller operand. NaN is treated as in `_fmax`."""
    return torch.where((x <= y) | (y != y), x, y)


@decomposes(aten.frexp.Tensor)
def _frexp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the exponent bit by bit: scale by 2^-steps or 2^steps if the number then stays on its side of one."""
    size, exponent = x.abs(), torch.zeros_like(x, dtype=torch.int32)
    unscaled = (size == 0) | (size == math.inf) | (size != size)
    largest_step = math.frexp(torch.finfo(x.dtype).max)[1] // 2
    # Subnormal numbers need the largest step twice.
    for steps in (largest_step, *(largest_step >> k for k in range(largest_step.bit_length()))):
        large, small = size >= 2.0 ** (steps - 1), size < 2.0**-steps
        for chosen, by in ((large, steps), (small, -steps)):
            size = torch.where(chosen, size * 2.0**-by, size)
            exponent = exponent + chosen.to(torch.int32) * by
    fraction = torch.where(unscaled, x, torch.where(x < 0, -size, size))
    return fraction, torch.where(unscaled, 0, exponent)


@decomposes(aten.nextafter.default)
def _nextafter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Move `x` towards `y` by the spacing of the numbers in its binade.

    From a power of two towards zero, the spacing is that of the next smaller binade.
    """
    dtype = torch.result_type(x, y)
    x, y = torch.broadcast_tensors(x.to(dtype), y.to(dtype))
    info, size = torch.finfo(dtype), x.abs()
    fraction = torch.frexp(size)[0]
    inwards = (y < x) == (x > 0)
    power = size / torch.where(size == 0, 1.0, 2 * fraction)  # the largest power of two not above `size`
    step = power * info.eps * torch.where(inwards & (fraction == 0.5), 0.5, 1.0)
    step = step.clamp(min=info.smallest_normal * info.eps)
    neighbour = torch.where(y > x, x + step, x - step)
    neighbour = torch.where(size == math.inf, (torch.zeros_like(x) + info.max).copysign(x), neighbour)
    return torch.where(x == y, y, torch.where((x != x) | (y != y), math.nan, neighbour)).to(dtype)


@decomposes(aten.hypot.default)
def _hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Factor out the larger operand, so that no square overflows."""
    dtype = torch.result_type(x, y)
    one, other = x.to(dtype).abs(), y.to(dtype).abs()
    large, small = torch.maximum(one, other), torch.minimum(one, other)
    ratio = torch.where((large == 0) | (small == math.inf), 0.0, small / large)
    infinite = (one == math.inf) | (other == math.inf)
    return torch.where(infinite, math.inf, large * (1 + ratio * ratio).sqrt())


@decomposes(aten.trunc.default)
def _trunc(x: torch.Tensor) -> torch.Tensor:
    """torch-mlir 20261001 turns negative zero into zero."""
    if not x.is_floating_point():
        return x.clone()
    return torch.where(x < 0, x.ceil(), x.floor())


@decomposes(aten.angle.default)
def _angle(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return torch.atan2(x.imag, x.real)
    x = in_floating_point(x)
    return torch.where(x != x, x, torch.where(x < 0, math.pi, torch.zeros_like(x)))


@decomposes(aten._efficientzerotensor.default)
def _zeros(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """The tensor that autograd creates for a gradient that is zero everywhere."""
    return torch.zeros(size, dtype=dtype)


@decomposes(aten.copy.default)
def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Cast what is written into a tensor of another dtype, as torch-mlir 20261001 does not."""
    if source.dtype == target.dtype:
        return NotImplemented
    return aten.copy.default(target, source.to(target.dtype))
