"""Reductions over consecutive segments of one dimension; a tensor holds the lengths of the segments."""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten

_IDENTITY = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


@decomposes(aten.segment_reduce.default)
def _segment_reduce(
    data: torch.Tensor,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> torch.Tensor:
    """Reduce over all elements for each segment; elements of other segments are the reduction's identity."""
    if data.numel() == 0:
        return NotImplemented
    start, end = _bounds(lengths, offsets)
    member = _member(start, end, data, axis)
    spread = torch.where(member, data.unsqueeze(axis), _IDENTITY[reduce])
    return _reduced(spread, reduce, (end - start), axis, initial)


def _bounds(lengths: torch.Tensor | None, offsets: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The start and the end of each segment."""
    if offsets is not None:
        return offsets[..., :-1], offsets[..., 1:]
    assert lengths is not None
    end = aten.cumsum.default(lengths, lengths.ndim - 1)
    return end - lengths, end


def _member(start: torch.Tensor, end: torch.Tensor, data: torch.Tensor, axis: int) -> torch.Tensor:
    """[..., segment, element, 1...]: whether an element of `data` is in a segment."""
    places = torch.arange(data.shape[axis], device=data.device)
    member = (start.unsqueeze(-1) <= places) & (places < end.unsqueeze(-1))
    return member.reshape([*member.shape, *[1] * (data.ndim - 1 - axis)])


def _reduced(spread: torch.Tensor, reduce: str, count: torch.Tensor, axis: int, initial: float | None) -> torch.Tensor:
    """Reduce the elements; the initial value is one more element, which a mean does not count."""
    dim = axis + 1
    if reduce in ("max", "min"):
        limit = spread.amax(dim) if reduce == "max" else spread.amin(dim)
        if initial is None:
            return limit
        return limit.clamp_min(initial) if reduce == "max" else limit.clamp_max(initial)
    if reduce == "prod":
        return spread.prod(dim) * (1.0 if initial is None else initial)
    total = spread.sum(dim) + (0.0 if initial is None else initial)
    if reduce == "sum":
        return total
    count = count.reshape([*count.shape, *[1] * (total.ndim - count.ndim)])
    empty = torch.full_like(total, math.nan) if initial is None else total
    return torch.where(count > 0, total / count.clamp_min(1), empty)


@decomposes(aten._segment_reduce_backward.default)
def _segment_reduce_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    data: torch.Tensor,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> torch.Tensor:
    """Give each element the gradient of its segment.

    Every element is in at most one segment, so the sum over segments only selects. The gradient of a maximum or minimum
    is divided among the elements that are equal to it.
    """
    start, end = _bounds(lengths, offsets)
    member = _member(start, end, data, axis)
    segment_grad = grad.unsqueeze(axis + 1)
    elements = data.unsqueeze(axis)
    if reduce in ("max", "min"):
        reaches = member & ((elements == output.unsqueeze(axis + 1)) | (elements != elements))
        share = segment_grad / reaches.to(grad.dtype).sum(axis + 1, keepdim=True).clamp_min(1)
        return torch.where(reaches, share, 0.0).sum(axis)
    if reduce == "mean":
        count = (end - start).clamp_min(1)
        segment_grad = segment_grad / count.reshape([*count.shape, *[1] * (grad.ndim - count.ndim)]).unsqueeze(axis + 1)
    if reduce == "prod":
        segment_grad = segment_grad * _product_of_others(torch.where(member, elements, 1.0), axis + 1)
        segment_grad = segment_grad if initial is None else segment_grad * initial
    return torch.where(member, segment_grad, 0.0).sum(axis)


def _product_of_others(x: torch.Tensor, dim: int) -> torch.Tensor:
    """For each element, the product of all others, from the products before and after it; avoids division by zero."""
    ones = torch.ones_like(x.narrow(dim, 0, 1))
    size = x.shape[dim]
    before = torch.cat([ones, x.cumprod(dim).narrow(dim, 0, size - 1)], dim)
    after = torch.cat([ones, x.flip(dim).cumprod(dim).narrow(dim, 0, size - 1)], dim).flip(dim)
    return before * after
