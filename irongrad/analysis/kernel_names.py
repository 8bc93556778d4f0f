"""The names of kernels that pack the operands of products.

IREE 3.13.0 makes a kernel of each packing after the flow phase, which the record is made of. It names the kernel by a
number and by the shapes (`getDispatchFuncName` in MaterializeEncodings.cpp): `_encoding_3_encode_8x4xf32_to_8x4xf32`.
The number is not known before, so the record leaves it out.
"""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"_encoding_\d+_(?=encode_)")


def packing_name(source: str, result: str) -> str:
    """The name in the record of the kernel that packs a tensor; both shapes are spelled as in `8x4xf32`."""
    return f"encode_{source}_to_{result}"


def recorded_name(profiled: str) -> str:
    """The name in the record of a kernel that a profile names."""
    return _NUMBERED.sub("", profiled)
