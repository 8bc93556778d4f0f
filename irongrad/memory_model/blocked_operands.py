"""Which operands contractions copy into blocks, or transpose (`passes/module/matmul_kernels`), on a CPU with AVX-512.

With AVX2 alone, tiles have fewer columns, so a few more products have kernels of ours.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from irongrad.memory_model.chunked_products import is_turned, total_of
from irongrad.memory_model.product_tiles import AVX512, has_few_rows, is_near, tile_for
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
    left = contraction.args[-2]
    transposed = _is_transposed(left) if total_of(contraction) is None else is_turned(left)
    return transposed and not is_near(_sizes(contraction), "rk")


def has_blocks_of_columns(contraction: Node, *, is_body: bool) -> bool:
    """Whether a contraction copies its right operand before it runs, into blocks of columns or transposed."""
    sizes, width, transposed = _sizes(contraction), AVX512[0].width, _is_transposed(contraction.args[-1])
    if not is_body and has_few_rows(sizes) and not (transposed and sizes["k"] % width):
        return False
    if sizes["c"] % width:  # no whole blocks, so that only a transposed operand is copied
        return transposed
    return transposed or not is_near(sizes, "kc")


def _sizes(contraction: Node) -> dict[str, int]:
    *batch, rows, columns = contraction.meta["val"].shape
    chunk = contraction.args[-2].meta["val"].shape[-1]
    if total_of(contraction) is not None:
        return {"r": rows, "c": columns, "k": math.prod(batch) * chunk}
    return {"b": math.prod(batch), "r": rows, "c": columns, "k": chunk}


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
