"""Functions of one element at a time: arithmetic, rounding and the parts of a number."""

from __future__ import annotations

import math

import torch

from irongrad.decompositions.registry import decomposes, uses_pytorch
from irongrad.decompositions.series import in_floating_point

aten = torch.ops.aten

uses_pytorch(
    aten.lerp,
    aten.addcmul,
    aten.addcdiv,
    aten.rsub,
    aten.detach,
)


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
    return torch.where((x >= y) | (y != y), x, y)


@decomposes(aten.fmin.default)
def _fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
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
