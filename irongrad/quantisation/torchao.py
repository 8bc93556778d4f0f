"""Read weights that torchao has quantised, in its plain layouts of int8 and int4.

torchao's tensors are subclasses of `torch.Tensor` that hold packed tensors. They are known here by their class and read
by their attributes, so that torchao need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from irongrad.quantisation.weights import QuantizedWeight
from irongrad.runtime.errors import UserError


def is_torchao(weight: Any) -> bool:
    """Whether `weight` is a tensor of torchao's."""
    return isinstance(weight, Tensor) and type(weight).__module__.partition(".")[0] == "torchao"


def read_torchao(weight: Any) -> QuantizedWeight:
    """The packed numbers, scales and offsets of a tensor of torchao's.

    Args:
        weight: an `Int8Tensor`, or an `Int4Tensor` in the packing format `plain`, [rows, columns].

    Raises:
        UserError: it has another layout, quantises activations too, or is not a matrix.
    """
    name = type(weight).__name__
    if name not in _READERS:
        known = " and ".join(_READERS)
        raise UserError(f"torchao's {name} has a layout that cannot be read; {known} can, in torchao's plain formats")
    if weight.ndim != 2:
        raise UserError(f"torchao's {name} has {weight.ndim} dimensions, and a weight has two")
    for attribute in ("act_quant_kwargs", "act_pre_scale"):
        if getattr(weight, attribute, None) is not None:
            raise UserError(f"torchao's {name} quantises or scales activations too ({attribute}); only weights can be")
    return _READERS[name](weight)


def _int8(weight: Any) -> QuantizedWeight:
    rows, columns = weight.shape
    of_row, group = weight.block_size
    scale, zero = weight.scale, weight.zero_point
    offset = None if zero is None or not zero.any() else -zero.float() * scale
    if of_row not in (1, rows) or columns % group:
        raise UserError(f"torchao's Int8Tensor has blocks of {of_row} x {group} numbers, which share no row")
    shape = rows, columns // group
    return QuantizedWeight(weight.qdata, _expanded(scale, shape), None if offset is None else _expanded(offset, shape))


def _expanded(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    return scale.reshape(-1, shape[1]).expand(shape).contiguous()


def _int4(weight: Any) -> QuantizedWeight:
    """Numbers are in two's complement, and `zero_point` is what a number of zero stands for."""
    rows, columns = weight.shape
    if weight.qdata.shape != (rows, columns // 2):
        raise UserError(f"torchao's Int4Tensor packs {rows} x {columns} numbers as {tuple(weight.qdata.shape)}")
    biased = weight.qdata.view(torch.uint8) ^ 0x88  # adds 8 to each number
    offset = weight.zero_point.mT.contiguous()
    return QuantizedWeight(biased, weight.scale.mT.contiguous(), offset if offset.any() else None)


_READERS: dict[str, Callable[[Any], QuantizedWeight]] = {"Int8Tensor": _int8, "Int4Tensor": _int4}
