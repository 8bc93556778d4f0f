"""What contractions read in panels (`irongrad/pipeline/products.py`), on a CPU with AVX-512.

With AVX2 alone panels are narrower, and a few more products have them.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from irongrad.passes.memory.written import CONTRACTIONS, TRANSPOSES, joined, moves, order_of
from irongrad.pipeline.products import AVX512, fits


def reads_panels(node: Node) -> bool:
    """Whether `node` is a contraction of panels: a kernel of its own, which computes nothing else."""
    if node.target not in CONTRACTIONS:
        return False
    values = [n.meta["val"] for n in (*node.args[-2:], node)]
    if any(value.dtype is not torch.float32 or not all(isinstance(s, int) for s in value.shape) for value in values):
        return False
    *batch, rows, columns = values[-1].shape
    sizes = {"b": math.prod(batch), "r": rows, "c": columns, "k": values[0].shape[-1]}
    return fits(sizes, AVX512, has_rows_apart=has_rows_apart(node))


def has_rows_apart(contraction: Node) -> bool:
    """Whether what a row of the left operand has is not side by side in memory."""
    left = contraction.args[-2]
    if not (left.target in TRANSPOSES and moves(left)):
        return False
    order = order_of(left)
    return order[-1] != max(order)


def is_written_in_order(operand: Node) -> bool:
    """Whether an operand is a reshaped transpose, which is written out before."""
    source = joined(operand)
    return source is not operand and source.target in TRANSPOSES and moves(source)
