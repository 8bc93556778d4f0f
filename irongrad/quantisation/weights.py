"""Quantised weights: how they are packed, and the float32 values that they stand for.

A weight has the shape [rows, columns]. Each row is divided into groups of consecutive columns, which share a scale:

    value = number * scale + offset

Weight-only quantisation with one scale a group is that of Frantar et al., "GPTQ" (2022, arXiv:2210.17323), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from irongrad.runtime.errors import UserError

# By form, the largest magnitude of a number that `pack` makes. Numbers are symmetric about zero.
_LARGEST = {"int8": 127, "int4": 7}

FORMS = (*_LARGEST, "bf16")

# A four-bit number is stored with this added, so that it is not negative.
BIAS = 8


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight in a few bits for each number.

    Attributes:
        packed: int8 [rows, columns]; or uint8 [rows, columns / 2] with two four-bit numbers a byte, the one of the even
            column in the low bits, each plus 8; or the values themselves in bfloat16 or float16 [rows, columns].
        scale: floats [rows, groups]; None if `packed` has the values.
        offset: floats [rows, groups], added to each value; None for zeros.
    """

    packed: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.packed.shape[0])

    @property
    def columns(self) -> int:
        """The number of columns."""
        return int(self.packed.shape[1]) * (2 if self.packed.dtype is torch.uint8 else 1)

    @property
    def form(self) -> str:
        """What each number is stored in, and how many share a scale, for people."""
        bits = {torch.int8: "int8", torch.uint8: "int4", torch.bfloat16: "bf16", torch.float16: "fp16"}
        group = "" if self.scale is None else f", group={self.columns // self.scale.shape[1]}"
        return bits[self.packed.dtype] + group


def pack(weight: Tensor, form: str, group: int | None = None) -> QuantizedWeight:
    """Round a weight to the nearest values of a form.

    Args:
        weight: floats [rows, columns].
        form: `int8`, `int4` or `bf16`.
        group: the number of columns that share a scale; all columns of a row by default. `bf16` has no scales.

    Raises:
        UserError: the columns cannot be divided into groups, or a group of `int4` is odd, or the weight has a value
            that is not finite.
    """
    weight = weight.detach()
    if form == "bf16":
        return QuantizedWeight(weight.to(torch.bfloat16))
    columns = weight.shape[1]
    size = group or columns
    if columns % size:
        raise UserError(f"its {columns} columns cannot be divided into groups of {size}")
    if form == "int4" and size % 2:
        raise UserError(f"int4 stores two numbers a byte, so groups are even, and {size} is odd")
    if not weight.isfinite().all():
        raise UserError("it has a value that is infinite or not a number")
    groups = weight.float().unflatten(1, (columns // size, size))
    scale = groups.abs().amax(-1) / _LARGEST[form]
    divisor = torch.where(scale > 0, scale, 1)  # a group of zeros
    numbers = (groups / divisor.unsqueeze(-1)).round().to(torch.int8).flatten(1)
    return QuantizedWeight(pack_pairs(numbers) if form == "int4" else numbers, scale)


def pack_pairs(numbers: Tensor) -> Tensor:
    """Pack numbers from -8 to 7, two a byte: int8 [rows, columns] -> uint8 [rows, columns / 2]."""
    biased = (numbers + BIAS).to(torch.uint8)
    return biased[:, 0::2] | (biased[:, 1::2] << 4)


def dequantised(packed: Tensor, scale: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
    """The values of a quantised weight, or of some of its rows.

    Args:
        packed: as in `QuantizedWeight`, with any dimensions in place of rows.
        scale: floats [..., groups], or None.
        offset: floats [..., groups], or None.

    Returns:
        float32 [..., columns].
    """
    if scale is None:
        return packed.float()
    numbers = packed.unflatten(-1, (scale.shape[-1], -1))
    if packed.dtype is torch.uint8:
        numbers = _unpacked(numbers)
    ones = (1,) * (numbers.ndim - scale.ndim)
    values = numbers.float() * scale.float().reshape(*scale.shape, *ones)
    if offset is not None:
        values = values + offset.float().reshape(*scale.shape, *ones)
    return values.flatten(packed.ndim - 1)


def _unpacked(packed: Tensor) -> Tensor:
    """The numbers of packed pairs: uint8 [..., n] -> int32 [..., n, 2].

    Elementwise code computes both numbers of a byte. IREE fuses it with the code that reads them; a stack it would
    write to memory first.
    """
    pairs = packed.int().unsqueeze(-1)
    is_low = torch.arange(2, device=packed.device) == 0
    return torch.where(is_low, pairs & 15, pairs >> 4) - BIAS
