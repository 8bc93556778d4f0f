"""Functions of one element at a time: arithmetic, rounding and the parts of a number."""

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


@decomposes(aten.rsub.Scalar)
def _rsub(x: torch.Tensor, other: float, alpha: float = 1) -> torch.Tensor:
    """PyTorch's decomposition makes a tensor of the number, which rounds it to float32 for a float64 x too."""
    x = x.to(torch.result_type(x, other))  # an integer's negative may be none of its dtype
    return (-x if alpha == 1 else x * -alpha) + other


@decomposes(aten.signbit.default)
def _signbit(x: torch.Tensor) -> torch.Tensor:
    """Negative zero is told by its inverse; torch-mlir 20261001 has no lowering for the bits of a float."""
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
    """A division: torch-mlir 20261001 asserts of a reciprocal's argument that it is not zero.

    IREE 3.13.0 copies that assertion until memory is full where it fuses a whole function of scalars.
    """
    return torch.full((), 1, dtype=torch.result_type(x, 1.0)) / x


@decomposes(aten.fmax.default)
def _fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The larger one; a NaN is no number, and the other one is the result."""
    return torch.where((x >= y) | (y != y), x, y)


@decomposes(aten.fmin.default)
def _fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As `_fmax`, the smaller one."""
    return torch.where((x <= y) | (y != y), x, y)


@decomposes(aten.frexp.Tensor)
def _frexp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponent bit by bit: doubled or halved 2^k times where that leaves the number on its side of one."""
    size, exponent = x.abs(), torch.zeros_like(x, dtype=torch.int32)
    unscaled = (size == 0) | (size == math.inf) | (size != size)
    most = math.frexp(torch.finfo(x.dtype).max)[1] // 2
    for steps in (
        most,
        *(most >> k for k in range(most.bit_length())),
    ):  # most twice, for numbers below the normal ones
        large, small = size >= 2.0 ** (steps - 1), size < 2.0**-steps
        for chosen, by in ((large, steps), (small, -steps)):
            size = torch.where(chosen, size * 2.0**-by, size)
            exponent = exponent + chosen.to(torch.int32) * by
    fraction = torch.where(unscaled, x, torch.where(x < 0, -size, size))
    return fraction, torch.where(unscaled, 0, exponent)


@decomposes(aten.nextafter.default)
def _nextafter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step of the number's binade, or of the smaller one below a power of two, towards y."""
    dtype = torch.result_type(x, y)
    x, y = torch.broadcast_tensors(x.to(dtype), y.to(dtype))
    info, size = torch.finfo(dtype), x.abs()
    fraction = torch.frexp(size)[0]
    inwards = (y < x) == (x > 0)
    power = size / torch.where(size == 0, 1.0, 2 * fraction)  # of two, up to the number
    step = power * info.eps * torch.where(inwards & (fraction == 0.5), 0.5, 1.0)
    step = step.clamp(min=info.smallest_normal * info.eps)
    moved = torch.where(y > x, x + step, x - step)
    moved = torch.where(size == math.inf, (torch.zeros_like(x) + info.max).copysign(x), moved)
    return torch.where(x == y, y, torch.where((x != x) | (y != y), math.nan, moved)).to(dtype)


@decomposes(aten.hypot.default)
def _hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With the larger one as a factor, so that no square overflows."""
    dtype = torch.result_type(x, y)
    one, other = x.to(dtype).abs(), y.to(dtype).abs()
    large, small = torch.maximum(one, other), torch.minimum(one, other)
    ratio = torch.where((large == 0) | (small == math.inf), 0.0, small / large)
    infinite = (one == math.inf) | (other == math.inf)
    return torch.where(infinite, math.inf, large * (1 + ratio * ratio).sqrt())


@decomposes(aten.trunc.default)
def _trunc(x: torch.Tensor) -> torch.Tensor:
    """torch-mlir 20261001 makes zero of negative zero."""
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
    """What autograd makes where a gradient is zero everywhere."""
    return torch.zeros(size, dtype=dtype)
