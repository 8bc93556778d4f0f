"""Products of groups of rows with a matrix each: a mixture of experts whose rows are sorted by expert.

How many rows a group has is known only at run time, and a compiled shape is not. So the rows are laid out in blocks of
one group each, padded with zeros, of which there are enough for every division into groups (after T. Gale et al.,
"MegaBlocks", arXiv:2211.15841); a batched product takes each block with its group's matrix. With blocks as long as an
average group this is at most twice the work of the rows alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from irongrad.operators.decompositions.registry import decomposes, decomposes_named

aten = torch.ops.aten


class _Blocks(NamedTuple):
    """Where sorted rows are in blocks of one group each."""

    group: torch.Tensor  # [blocks]: whose rows are in a block; any group for one that is not used
    row: torch.Tensor  # [blocks, length]: which row is at each place
    filled: torch.Tensor  # [blocks, length]: whether one is
    place: torch.Tensor  # [rows]: where in the flat blocks a row is
    grouped: torch.Tensor  # [rows]: whether a row is in any group: before the last offset


def _blocks(rows: int, offsets: torch.Tensor) -> _Blocks:
    """Lay out `rows` rows, those of group g before `offsets[g]` and not before `offsets[g - 1]`."""
    groups = offsets.shape[0]
    length = -(-rows // groups)
    count = rows // length + groups  # every group may have one that is not full
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
    every = torch.arange(rows, device=offsets.device)
    its = (every.unsqueeze(1) >= ends).to(torch.int64).sum(1)
    known = its.clamp(max=groups - 1)
    place = (first[known] * length + every - starts[known]).clamp(max=count * length - 1)
    return _Blocks(group, row.clamp(0, rows - 1), filled, place, its < groups)


def _laid_out(x: torch.Tensor, blocks: _Blocks) -> torch.Tensor:
    """The rows of `x` [rows, N] in blocks [blocks, length, N]."""
    taken = aten.index_select.default(x, 0, blocks.row.reshape(-1)).reshape([*blocks.row.shape, x.shape[1]])
    return torch.where(blocks.filled.unsqueeze(2), taken, torch.zeros_like(taken))


def by_rows(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row of `x` [rows, K] times the matrix of its group in `weights` [groups, K, N]; zero outside of all."""
    if x.numel() == 0 or weights.numel() == 0:
        return x.new_zeros([x.shape[0], weights.shape[2]])
    blocks = _blocks(x.shape[0], offsets)
    products = torch.bmm(_laid_out(x, blocks), aten.index_select.default(weights, 0, blocks.group))
    found = aten.index_select.default(products.flatten(0, 1), 0, blocks.place)
    return torch.where(blocks.grouped.unsqueeze(1), found, torch.zeros_like(found))


def by_groups(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """For each group the product [K, N] of its rows of `x` [rows, K], transposed, with those of `y` [rows, N]."""
    total = x.new_zeros([offsets.shape[0], x.shape[1], y.shape[1]])
    if x.numel() == 0 or total.numel() == 0:
        return total
    blocks = _blocks(x.shape[0], offsets)
    products = torch.bmm(_laid_out(x, blocks).mT, _laid_out(y, blocks))
    return aten.index_add.default(total, 0, blocks.group, products)


@decomposes(aten._grouped_mm.default)
def _grouped_mm(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Offsets divide the dimension that a matrix has and a stack of them lacks; of two matrices the inner one."""
    if offs is None:
        product = torch.bmm(x, y)
    elif x.ndim == 2 and y.ndim == 3:
        product = by_rows(x, y, offs)
    elif x.ndim == 3:
        product = by_rows(y.mT, x.mT, offs).mT
    else:
        product = by_groups(x.mT, y, offs)
    return product if out_dtype is None else product.to(out_dtype)


# The operators in which transformers (5.23, integrations/moe.py) hides these products from compilers.


@decomposes_named("transformers::grouped_mm_fallback")
def _transformers(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return by_rows(x, weight, offs)


@decomposes_named("transformers::grouped_mm_fallback_backward")
def _transformers_backward(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return by_rows(grad, weight.mT, offs), by_groups(x, grad, offs)
