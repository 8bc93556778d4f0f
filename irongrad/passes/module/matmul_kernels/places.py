"""The buffers that a kernel reads and writes, and the places in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """The buffers of a kernel, each as a memref of rank 1.

    Attributes:
        left: the left operand.
        right: the right operand; a `RightBlock` if the kernel keeps a block of it in its own memory.
        row: the row that is added to all rows of the result; None without one.
        result: the result.
    """

    left: Any
    right: Any
    row: Any | None
    result: Any


@dataclass(frozen=True)
class Place:
    """The position of a tile and of a block of the reduction dimension.

    Attributes:
        batch: the index of the matrices in the batch.
        strip: the index of the strip.
        row: the tile's first row.
        panel: the index of the panel.
        column: the tile's first column.
        summand: the block's first index in the reduction dimension.
    """

    batch: Any
    strip: Any
    row: Any
    panel: Any
    column: Any
    summand: Any
