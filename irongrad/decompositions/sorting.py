"""`topk` and `sort` of few elements, by counting how many come before each.

Two sorts in one step share the tensor of indices that IREE 3.13.0 lets both sort in place, and inside the loop of
`train_steps` the second iteration starts from sorted indices: wrong numbers from a mixture of experts with two routers.
Its sort is also serial and takes quadratic time.
"""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import decomposes

aten = torch.ops.aten

LONGEST_COUNTED = 128  # every element is compared with every other, in memory too


@decomposes(aten.topk.default)
def _topk(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.ndim == 0 or x.shape[dim] > LONGEST_COUNTED:
        return NotImplemented  # type: ignore[no-any-return]
    return _first(x, k, dim, descending=largest)


@decomposes(aten.sort.default)
def _sort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _stable_sort(x, stable=True, dim=dim, descending=descending)


@decomposes(aten.sort.stable)
def _stable_sort(
    x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.ndim == 0 or x.shape[dim] > LONGEST_COUNTED:
        return NotImplemented  # type: ignore[no-any-return]
    return _first(x, x.shape[dim], dim, descending=descending)


def _first(x: torch.Tensor, count: int, dim: int, *, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` elements along `dim` in stable order, and their indices; NaN is the largest, as in eager."""
    last = x.movedim(dim, -1)
    places = torch.arange(last.shape[-1], device=x.device)
    one, other = last.unsqueeze(-1), last.unsqueeze(-2)  # [..., place, 1] and [..., 1, place that it is compared with]
    larger, smaller = _exceeds(other, one), _exceeds(one, other)
    ahead = (larger if descending else smaller) | (~larger & ~smaller & (places < places.unsqueeze(-1)))
    rank = ahead.to(torch.int64).sum(-1)
    holds = rank.unsqueeze(-2) == places[:count].unsqueeze(-1)  # [..., rank, place]
    index = torch.where(holds, places, 0).sum(-1)
    return last.gather(-1, index).movedim(-1, dim), index.movedim(-1, dim)


def _exceeds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x > y) | ((x != x) & (y == y))
