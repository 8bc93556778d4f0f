"""Which operands contractions copy into blocks, or transpose (`passes/module/matmul_kernels`), on a CPU with AVX-512.

With AVX2 alone, tiles have fewer columns, so a few more products have kernels of ours.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from irongrad.memory_model.product_tiles import AVX512, is_near, tile_for
from irongrad.memory_model.written_views import CONTRACTIONS, TRANSPOSES, joined, moves, order_of


def reads_blocks(node: Node) -> bool:
    """Whether `node` is a contraction of blocks, which our own kernel computes without fusing anything else."""
    if node.target not in CONTRACTIONS:
        return False
    values = [n.meta["val"] for n in (*node.args[-2:], node)]
    if any(value.dtype is not torch.float32 or not all(isinstance(s, int) for s in value.shape) for value in values):
        return False
    return tile_for(_sizes(node), AVX512) is not None


def turns_left(contraction: Node) -> bool:
    """Whether a contraction copies its left operand with rows and columns transposed."""
    return _is_transposed(contraction.args[-2]) and not is_near(_sizes(contraction), "rk")


def has_blocks_of_columns(contraction: Node) -> bool:
    """Whether a contraction copies its right operand, into blocks of columns or transposed."""
    sizes, width, transposed = _sizes(contraction), AVX512[0].width, _is_transposed(contraction.args[-1])
    if sizes["c"] % width:  # no whole blocks; the kernel itself transposes a matrix of whole vectors
        return transposed and bool(sizes["k"] % width or sizes["b"] > 1)
    return transposed or not is_near(sizes, "kc")


def _sizes(contraction: Node) -> dict[str, int]:
    *batch, rows, columns = contraction.meta["val"].shape
    return {"b": math.prod(batch), "r": rows, "c": columns, "k": contraction.args[-2].meta["val"].shape[-1]}


def _is_transposed(operand: Node) -> bool:
    """Whether the last dimension of an operand is not the last one in memory."""
    if not (operand.target in TRANSPOSES and moves(operand)):
        return False
    order = order_of(operand)
    return order[-1] != max(order)


def is_written_in_order(operand: Node) -> bool:
    """Whether an operand is a reshaped transpose, which IREE writes to memory before the contraction."""
    source = joined(operand)
    return source is not operand and source.target in TRANSPOSES and moves(source)
