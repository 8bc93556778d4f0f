"""Products over chunks of the summands, which our kernels compute as one product (`passes/module/matmul_kernels`).

operators/decompositions/reductions.py writes a product of many summands as a batch of products and a sum. The kernel
reads both operands as they are before they are cut into chunks, and writes the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import torch
from torch.fx import Node

from irongrad.graph.movements import Movement, operators
from irongrad.memory_model.kernel_roles import dimensions_of
from irongrad.memory_model.written_views import TRANSPOSES, VIEWS, joined, moves, order_of

aten = torch.ops.aten

_READ_THROUGH = operators(Movement.RESHAPE) | TRANSPOSES | {aten.constant_pad_nd.default}


def total_of(product: Node) -> Node | None:
    """The sum over the chunks that a batch of products is of; None if it is a batch."""
    if product.target is not aten.bmm.default or len(product.users) != 1:
        return None
    (reader,) = product.users
    batch = product
    if reader.target in VIEWS and len(reader.users) == 1:
        batch, (reader,) = reader, reader.users
    if reader.target is not aten.sum.dim_IntList or batch.meta["val"].shape[-3:] != product.meta["val"].shape:
        return None
    return reader if list(reader.args[1]) == [batch.meta["val"].ndim - 3] else None


def chunked_by(product: Node) -> list[Node]:
    """The nodes that cut and pad both operands of a product over chunks, if only the product reads what they make."""
    chains = [list(_before_chunks(operand)) for operand in product.args[-2:]]
    return [node for chain in chains for node in takewhile(lambda n: len(n.users) == 1, chain)]


def is_turned(operand: Node) -> bool:
    """Whether the summands are not neighbours in the tensor that is cut into chunks, which is a left operand."""
    transposes = [n for n in _before_chunks(operand) if n.target in TRANSPOSES and moves(n)]
    return any(order_of(n)[-1] != max(order_of(n)) for n in transposes)


def _before_chunks(operand: Node) -> Iterator[Node]:
    """The views and paddings between a product and the matrix that it reads.

    The matrix is cut into chunks, which have three dimensions. Views of more dimensions come before the matrix.
    """
    most = 3
    while operand.target in _READ_THROUGH:
        before = operand.all_input_nodes[0]
        if dimensions_of(before) > most or joined(operand).target is aten.cat.default:
            return
        yield operand
        operand, most = before, dimensions_of(before)
