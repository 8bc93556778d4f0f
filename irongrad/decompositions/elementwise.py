"""Functions of one element at a time: arithmetic, rounding and the parts of a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from irongrad.decompositions.registry import decomposes, uses_pytorch
from irongrad.decompositions.series import in_floating_point

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
    return torch.where(x == y, y, torch.where((x != x) | (y != y), math.nan, moved))


@decomposes(aten.hypot.default)
def _hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With the larger one as a factor, so that no square overflows."""
    dtype = torch.result_type(x, y)
    one, other = x.to(dtype).abs(), y.to(dtype).abs()
    large, small = torch.maximum(one, other), torch.minimum(one, other)
    ratio = torch.where((large == 0) | (small == math.inf), 0.0, small / large)
    infinite = (one == math.inf) | (other == math.inf)
    return torch.where(infinite, math.inf, large * (1 + ratio * ratio).sqrt())


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


@decomposes(aten.fmod.Tensor)
def _fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """IREE 3.13.0 calls a C library that is not linked for float64's; exact for quotients up to 2^53."""
    if torch.result_type(x, y) != torch.float64:
        return NotImplemented
    size, divisor = x.to(torch.float64).abs(), y.to(torch.float64).abs()
    scale = torch.where(divisor > 2.0**900, torch.full_like(divisor, 2.0**-100), 1.0)
    rest = _minus_product(size * scale, (size / divisor).trunc(), divisor * scale) / scale
    rest = torch.where(rest < 0, rest + divisor, torch.where(rest >= divisor, rest - divisor, rest))
    rest = torch.where((size < divisor) & (size < math.inf), size, rest)
    return torch.where(torch.signbit(x), -rest, rest)


@decomposes(aten.fmod.Scalar)
def _fmod_scalar(x: torch.Tensor, y: float) -> torch.Tensor:
    """torch-mlir 20261001 has it of tensors alone."""
    return aten.fmod.Tensor(x, torch.full_like(x, y, dtype=torch.result_type(x, y)))


@decomposes(aten.remainder.Tensor)
def _remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With the sign of the divisor, as Python's; that of `_fmod` is the dividend's."""
    if torch.result_type(x, y) != torch.float64:
        return NotImplemented
    rest = aten.fmod.Tensor(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@decomposes(aten.remainder.Scalar)
def _remainder_scalar(x: torch.Tensor, y: float) -> torch.Tensor:
    if x.dtype != torch.float64:
        return NotImplemented
    return aten.remainder.Tensor(x, torch.full_like(x, y))


@decomposes(aten.remainder.Scalar_Tensor)
def _remainder_of_scalar(x: float, y: torch.Tensor) -> torch.Tensor:
    return aten.remainder.Tensor(torch.full_like(y, x), y)


def _minus_product(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x - y z in float64, with the product's rounding error (T. J. Dekker, Numer. Math. 18, 1971)."""
    product = y * z
    (y_high, y_low), (z_high, z_low) = _halves(y), _halves(z)
    error = y_low * z_low - (((product - y_high * z_high) - y_low * z_high) - y_high * z_low)
    return (x - product) - error


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and lower 26 bits of the significand, whose products are exact (Veltkamp's split, in Dekker)."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high
