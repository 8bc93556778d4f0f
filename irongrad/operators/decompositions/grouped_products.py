"""Grouped matrix products, one matrix per group of rows: a mixture of experts whose rows are sorted by expert.

The number of rows in a group is known only at run time, but compiled shapes are fixed. So the rows are laid out in
blocks of one group each, padded with zeros. There are enough blocks for every division into groups (after T. Gale et
al., "MegaBlocks", arXiv:2211.15841). A batched product multiplies each block by its group's matrix. With blocks as long
as an average group, this is at most twice the work of the rows alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from irongrad.operators.decompositions.registry import decomposes, decomposes_named

aten = torch.ops.aten


class _Blocks(NamedTuple):
    """The layout of sorted rows in blocks of one group each.

    Attributes:
        group: the group of each block, [blocks]; any group for an unused block.
        row: the row at each place of a block, [blocks, length].
        filled: whether a place holds a row, [blocks, length].
        place: the place of each row in the flattened blocks, [rows].
        grouped: whether a row belongs to a group, so lies before the last offset, [rows].
    """

    group: torch.Tensor
    row: torch.Tensor
    filled: torch.Tensor
    place: torch.Tensor
    grouped: torch.Tensor


def _blocks(rows: int, offsets: torch.Tensor) -> _Blocks:
    """Lay out `rows` rows. Group g has the rows from `offsets[g - 1]` up to, but without, `offsets[g]`."""
    groups = offsets.shape[0]
    length = -(-rows // groups)
    count = rows // length + groups  # every group may have one block that is not full
    ends = offsets.to(torch.int64)
    starts = aten.constant_pad_nd.default(ends[:-1], [1, 0])
    used = (ends - starts + length - 1) // length
    last = used.cumsum(0)
    first = last - used
    block = torch.arange(count, device=offsets.device)
    group = (block.unsqueeze(1) >= last).to(torch.int64).sum(1).clamp(max=groups - 1)
    within = (block - first[group]).unsqueeze(1) * length + torch.arange(length, device=offsets.device)
    row = starts[group].unsqueeze(1) + within
    filled = (within >= 0) & (row < ends[group].unsqueeze(1))
    numbers = torch.arange(rows, device=offsets.device)
    row_group = (numbers.unsqueeze(1) >= ends).to(torch.int64).sum(1)
    clamped_group = row_group.clamp(max=groups - 1)
    place = (first[clamped_group] * length + numbers - starts[clamped_group]).clamp(0, count * length - 1)
    return _Blocks(group, row.clamp(0, rows - 1), filled, place, row_group < groups)


def _in_blocks(x: torch.Tensor, blocks: _Blocks) -> torch.Tensor:
    """Gather the rows of `x` [rows, N] into blocks [blocks, length, N]."""
    gathered = aten.index_select.default(x, 0, blocks.row.reshape(-1)).reshape([*blocks.row.shape, x.shape[1]])
    return torch.where(blocks.filled.unsqueeze(2), gathered, torch.zeros_like(gathered))


def by_rows(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply each row of `x` by the matrix of its group.

    Args:
        x: [rows, K].
        weights: a matrix for each group, [groups, K, N].
        offsets: the number of the first row after each group, [groups].

    Returns:
        The products, [rows, N]; zero for rows of no group.
    """
    if x.numel() == 0 or weights.numel() == 0:
        return x.new_zeros([x.shape[0], weights.shape[2]])
    blocks = _blocks(x.shape[0], offsets)
    products = torch.bmm(_in_blocks(x, blocks), aten.index_select.default(weights, 0, blocks.group))
    found = aten.index_select.default(products.flatten(0, 1), 0, blocks.place)
    return torch.where(blocks.grouped.unsqueeze(1), found, torch.zeros_like(found))


def by_groups(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply, for each group, its rows of `x`, transposed, by its rows of `y`.

    Args:
        x: [rows, K].
        y: [rows, N].
        offsets: the number of the first row after each group, [groups].

    Returns:
        The products, [groups, K, N].
    """
    total = x.new_zeros([offsets.shape[0], x.shape[1], y.shape[1]])
    if x.numel() == 0 or total.numel() == 0:
        return total
    blocks = _blocks(x.shape[0], offsets)
    products = torch.bmm(_in_blocks(x, blocks).mT, _in_blocks(y, blocks))
    return aten.index_add.default(total, 0, blocks.group, products)


@decomposes(aten._grouped_mm.default)
def _grouped_mm(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Choose the product that fits the dimension which the offsets divide.

    With one matrix and one batch of matrices, they divide the outer dimension of the single matrix. With two matrices,
    they divide the reduction dimension.
    """
    if offs is None:
        product = torch.bmm(x, y)
    elif x.ndim == 2 and y.ndim == 3:
        product = by_rows(x, y, offs)
    elif x.ndim == 3:
        product = by_rows(y.mT, x.mT, offs).mT
    else:
        product = by_groups(x.mT, y, offs)
    return product if out_dtype is None else product.to(out_dtype)


# transformers 5.23 (transformers/integrations/moe.py) hides these products from compilers in custom operators.


@decomposes_named("transformers::grouped_mm_fallback")
def _transformers(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return by_rows(x, weight, offs)


@decomposes_named("transformers::grouped_mm_fallback_backward")
def _transformers_backward(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return by_rows(grad, weight.mT, offs), by_groups(x, grad, offs)
