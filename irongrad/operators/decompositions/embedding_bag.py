"""Embedding bags: table rows are looked up by index, and reduced over consecutive runs of indices."""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.runtime.errors import UnsupportedOpError

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2  # ATen, EmbeddingBag.h
_Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@decomposes(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> _Bags:
    """The bags, the bag of each index, the size of each bag, and in mode max the source row of each element."""
    count = offsets.shape[0] - int(include_last_offset)
    bag = _bag_of(indices, offsets, count)
    member = (bag == torch.arange(count, device=bag.device).unsqueeze(1)) & (indices != padding_idx)  # [bag, index]
    size = member.to(torch.int64).sum(1)
    rows = aten.index_select.default(weight, 0, indices)
    if mode == _MAX:
        bags, source = _largest(rows, member, indices)
        return bags, bag, size, source
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    rows = torch.where((indices != padding_idx).unsqueeze(1), rows, torch.zeros_like(rows))
    bags = aten.index_put.default(rows.new_zeros(count, weight.shape[1]), [bag], rows, True)
    if mode == _MEAN:
        bags = bags / size.clamp_min(1).unsqueeze(1)
    return bags, bag, size, torch.zeros_like(size)


def _bag_of(indices: torch.Tensor, offsets: torch.Tensor, count: int) -> torch.Tensor:
    """The bag of each index: the last bag that starts at or before the index's position."""
    places = torch.arange(indices.shape[0], device=indices.device).unsqueeze(1)
    return (offsets[:count] <= places).to(torch.int64).sum(1) - 1


def _largest(rows: torch.Tensor, member: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    within = member.unsqueeze(2)  # [bag, index, 1]
    largest = torch.where(within, rows, -math.inf).amax(1, keepdim=True)
    places = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    place = torch.where(within & (rows == largest), places, rows.shape[0] - 1).amin(1)
    nonempty = member.any(1, keepdim=True)
    source = aten.index_select.default(indices, 0, place.reshape(-1)).reshape(place.shape)
    return torch.where(nonempty, largest.squeeze(1), 0.0), torch.where(nonempty, source, 0)


@decomposes(aten._embedding_bag_backward.default)
def _embedding_bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> torch.Tensor:
    """Recompute the bag of each index: `offset2bag` is empty if eager took a shortcut."""
    if scale_grad_by_freq:
        raise UnsupportedOpError(
            "embedding_bag with scale_grad_by_freq=True: PyTorch 2.13 divides a row's gradient by the frequency of "
            "another row (ATen, _embedding_bag_dense_backward_cpu_sum_mean), so there is no reference result to match. "
            "Use torch.nn.functional.embedding with scale_grad_by_freq=True, and reduce its result"
        )
    if mode == _MAX:
        nonempty = (bag_size > 0).unsqueeze(1)
        zeros = grad.new_zeros(num_weights, grad.shape[1])
        return aten.scatter_add.default(zeros, 0, maximum_indices, torch.where(nonempty, grad, 0.0))
    bag = _bag_of(indices, offsets, grad.shape[0])
    if mode == _MEAN:
        grad = grad / bag_size.clamp_min(1).unsqueeze(1)
    rows = aten.index_select.default(grad, 0, bag)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    return aten.embedding_dense_backward.default(rows, indices, num_weights, padding_idx, False)


@decomposes(aten._embedding_bag_per_sample_weights_backward.default)
def _per_sample_weights_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    """The gradient of w_i in sum_i w_i row_i: the dot product of the bag's gradient and the row.

    It is zero for padding.
    """
    bag = _bag_of(indices, offsets, grad.shape[0])
    products = aten.index_select.default(grad, 0, bag) * aten.index_select.default(weight, 0, indices)
    return torch.where(indices != padding_idx, products.sum(1), 0.0)
