"""What contractions read in blocks, or turned (`passes/module/matmul_kernels`), on a CPU with AVX-512.

With AVX2 alone tiles have fewer columns, so that a few more products have kernels of ours.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from irongrad.memory_model.product_tiles import AVX512, is_near, tile_for
from irongrad.memory_model.written_views import CONTRACTIONS, TRANSPOSES, joined, moves, order_of


def reads_blocks(node: Node) -> bool:
    """Whether `node` is a contraction of blocks: a kernel of its own, which computes nothing else."""
    if node.target not in CONTRACTIONS:
        return False
    values = [n.meta["val"] for n in (*node.args[-2:], node)]
    if any(value.dtype is not torch.float32 or not all(isinstance(s, int) for s in value.shape) for value in values):
        return False
    return tile_for(_sizes(node), AVX512) is not None


def turns_left(contraction: Node) -> bool:
    """Whether a contraction has its left operand turned."""
    return _is_turned(contraction.args[-2]) and not is_near(_sizes(contraction), "rk")


def has_blocks_of_columns(contraction: Node) -> bool:
    """Whether a contraction reads its right operand in blocks."""
    return _is_turned(contraction.args[-1]) or not is_near(_sizes(contraction), "kc")


def _sizes(contraction: Node) -> dict[str, int]:
    *batch, rows, columns = contraction.meta["val"].shape
    return {"b": math.prod(batch), "r": rows, "c": columns, "k": contraction.args[-2].meta["val"].shape[-1]}


def _is_turned(operand: Node) -> bool:
    """Whether the last dimension of an operand is another in memory."""
    if not (operand.target in TRANSPOSES and moves(operand)):
        return False
    order = order_of(operand)
    return order[-1] != max(order)


def is_written_in_order(operand: Node) -> bool:
    """Whether an operand is a reshaped transpose, which is written out before."""
    source = joined(operand)
    return source is not operand and source.target in TRANSPOSES and moves(source)
