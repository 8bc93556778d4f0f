"""Sorting, and operators that are defined by an order: topk, kthvalue, median and mode.

IREE 3.13.0 sorts serially in quadratic time. It also lets two sorts in one step sort a shared index tensor in place:
inside the loop of `train_steps` the second iteration starts from sorted indices. So nothing here uses IREE's sort.

A short row, or one of any size, is sorted by counting, for each element, how many elements come before it. A long row
is split into runs. Each run is sorted by counting, and runs are merged by rank (R. Cole, "Parallel merge sort", SIAM J.
Comput. 17, 1988, uses the same ranks).
"""

from __future__ import annotations

import math

import torch

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import is_known

aten = torch.ops.aten

LONGEST_COUNTED = 128  # counting compares every element with every other, and stores all comparisons

_Pair = tuple[torch.Tensor, torch.Tensor]


@decomposes(aten.sort.default)
def _sort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> _Pair:
    return _stable_sort(x, stable=True, dim=dim, descending=descending)


@decomposes(aten.sort.stable)
def _stable_sort(x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> _Pair:
    if x.numel() == 0 or x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    return _gathered_along(x, dim, _order(x.movedim(dim, -1), descending=descending))


@decomposes(aten.topk.default)
def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> _Pair:
    if x.ndim == 0:
        values, index = _topk(x.reshape(1), k, 0, largest, sorted)
        return (values, index) if k == 0 else (values.reshape([]), index.reshape([]))
    if k == 0 or x.numel() == 0:
        shape = [k if d == dim % x.ndim else s for d, s in enumerate(x.shape)]
        return x.new_zeros(shape), x.new_zeros(shape, dtype=torch.int64)
    return _gathered_along(x, dim, _first(x.movedim(dim, -1), k, descending=largest))


@decomposes(aten.kthvalue.default)
def _kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> _Pair:
    return _at(x, dim, keepdim, k - 1)


@decomposes(aten.median.dim)
def _median_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> _Pair:
    """The lower of the two elements in the middle; the first NaN if there is one. NaN is sorted last."""
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    size = x.shape[dim]
    missing = x.isnan().to(torch.int64).sum(dim, keepdim=True)
    return _at(x, dim, keepdim, torch.where(missing > 0, size - missing, (size - 1) // 2))


@decomposes(aten.nanmedian.dim)
def _nanmedian_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> _Pair:
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    present = (~x.isnan()).to(torch.int64).sum(dim, keepdim=True)
    return _at(x, dim, keepdim, ((present - 1) // 2).clamp_min(0))


@decomposes(aten.median.default)
def _median(x: torch.Tensor) -> torch.Tensor:
    return _median_dim(x.reshape(-1), 0)[0] if x.numel() else x.new_full([], math.nan)


@decomposes(aten.nanmedian.default)
def _nanmedian(x: torch.Tensor) -> torch.Tensor:
    return _nanmedian_dim(x.reshape(-1), 0)[0] if x.numel() else x.new_full([], math.nan)


@decomposes(aten.mode.default)
def _mode(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> _Pair:
    """The smallest of the most frequent values, and its last place."""
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    last = x.movedim(dim, -1)
    count = (last.unsqueeze(-1) == last.unsqueeze(-2)).to(torch.int64).sum(-1)
    often = count == count.amax(-1, keepdim=True)
    value = torch.where(often, last, _largest(x.dtype)).amin(-1, keepdim=True)
    places = torch.arange(last.shape[-1], device=x.device)
    index = torch.where(last == value, places, 0).amax(-1, keepdim=True)
    found, index = last.gather(-1, index).movedim(-1, dim), index.movedim(-1, dim)
    return (found, index) if keepdim else (found.squeeze(dim), index.squeeze(dim))


def _at(x: torch.Tensor, dim: int, keepdim: bool, place: int | torch.Tensor) -> _Pair:
    """The value at `place` in the ascending order along `dim`, and its index.

    A tensor `place` has size 1 along `dim`.
    """
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    last = x.movedim(dim, -1)
    wanted = (
        place.movedim(dim, -1)
        if isinstance(place, torch.Tensor)
        else torch.full_like(last[..., :1], place, dtype=torch.int64)
    )
    if _is_counted(last):
        index = _counted(last, wanted, descending=False)
    else:
        index = _order(last, descending=False).gather(-1, wanted)
    value, index = _gathered_along(x, dim, index)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _gathered_along(x: torch.Tensor, dim: int, index: torch.Tensor) -> _Pair:
    """Gather from `x` along `dim`; the last dimension of `index` is that dimension."""
    index = index.movedim(-1, dim)
    return x.gather(dim, index), index


# --- orders of the last dimension ---------------------------------------------------------------------------------


def _is_counted(x: torch.Tensor) -> bool:
    """Whether the last dimension is sorted by counting: if it is short, or if only a call knows how long it is."""
    length = x.shape[-1]
    return not is_known(length) or length <= LONGEST_COUNTED


def _order(x: torch.Tensor, *, descending: bool) -> torch.Tensor:
    """The indices that sort the last dimension stably; NaN is the largest, as in eager."""
    if _is_counted(x):
        return _counted(x, _places(x), descending=descending)
    length = x.shape[-1]
    runs = 1 << (math.ceil(length / LONGEST_COUNTED) - 1).bit_length()
    run = math.ceil(length / runs)
    padded = _padded(x, runs * run - length, descending=descending)
    parts = padded.reshape([*x.shape[:-1], runs, run])
    index = _counted(parts, _places(parts), descending=descending)
    starts = torch.arange(0, runs * run, run, device=x.device).unsqueeze(-1)
    values, index = parts.gather(-1, index), index + starts
    while values.shape[-2] > 1:
        values, index = _merged(values, index, descending=descending)
    return index.squeeze(-2).narrow(-1, 0, length)


def _first(x: torch.Tensor, count: int, *, descending: bool) -> torch.Tensor:
    """The indices of the first `count` elements in the order of the last dimension.

    A long row is split into parts; its first elements are among the first elements of its parts. Equal elements stay in
    the order of their indices, because they do so in the parts.
    """
    if _is_counted(x):
        return _counted(x, _places(x)[:count], descending=descending)
    length = x.shape[-1]
    part = max(LONGEST_COUNTED, 2 * count)
    if part >= length:
        return _order(x, descending=descending).narrow(-1, 0, count)
    parts = math.ceil(length / part)
    padded = _padded(x, parts * part - length, descending=descending)
    rows = padded.reshape([*x.shape[:-1], parts, part])
    index = _first(rows, count, descending=descending)
    values = rows.gather(-1, index).flatten(-2)
    index = (index + torch.arange(0, parts * part, part, device=x.device).unsqueeze(-1)).flatten(-2)
    return index.gather(-1, _first(values, count, descending=descending))


def _padded(x: torch.Tensor, count: int, *, descending: bool) -> torch.Tensor:
    """Append `count` elements that are last in the order: no element sorts after them, and equal ones precede them."""
    if count == 0:
        return x
    filler = _smallest(x.dtype) if descending else _last(x.dtype)
    return torch.cat([x, x.new_full([*x.shape[:-1], count], filler)], -1)


def _largest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def _smallest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def _last(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else _largest(dtype)


def _counted(x: torch.Tensor, wanted: torch.Tensor, *, descending: bool) -> torch.Tensor:
    """The indices of the elements at the places `wanted` of the order; a place is the number of elements before it."""
    places = _places(x)
    one, other = x.unsqueeze(-1), x.unsqueeze(-2)  # [..., place, 1] and [..., 1, place that it is compared with]
    ahead = _before(other, one, descending=descending)
    alike = ~ahead & ~_before(one, other, descending=descending)
    rank = (ahead | (alike & (places < places.unsqueeze(-1)))).to(torch.int64).sum(-1)
    holds = rank.unsqueeze(-2) == wanted.unsqueeze(-1)  # [..., wanted, place]
    return torch.where(holds, places, 0).sum(-1)


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[-1], device=x.device)


def _merged(values: torch.Tensor, index: torch.Tensor, *, descending: bool) -> _Pair:
    """Merge neighbouring sorted runs [..., runs, run] to [..., runs / 2, 2 * run].

    An element's place is its place in its own run plus the number of elements of the other run that come before it. An
    element of the right run counts only if it sorts strictly before. An element of the left run also counts if it is
    equal.
    """
    run = values.shape[-1]
    left, right = values[..., 0::2, :], values[..., 1::2, :]
    places = torch.arange(run, device=values.device)
    from_left = places + _rank(right, left, alike=False, descending=descending)
    from_right = places + _rank(left, right, alike=True, descending=descending)
    place = torch.cat([from_left, from_right], -1)
    both = torch.cat([left, right], -1), torch.cat([index[..., 0::2, :], index[..., 1::2, :]], -1)
    return aten.scatter.src(both[0], -1, place, both[0]), aten.scatter.src(both[1], -1, place, both[1])


def _rank(run: torch.Tensor, x: torch.Tensor, *, alike: bool, descending: bool) -> torch.Tensor:
    """The number of elements of the sorted `run` that come before each of `x`, by binary search in the last dimension.

    With `alike`, elements that are equal come before too.
    """
    length = run.shape[-1]
    rank = torch.zeros_like(x, dtype=torch.int64)
    step = 1 << (length.bit_length() - 1)
    while step:
        probe = run.gather(-1, (rank + (step - 1)).clamp_max(length - 1))
        ahead = ~_before(x, probe, descending=descending) if alike else _before(probe, x, descending=descending)
        rank = torch.where(ahead & (rank + step <= length), rank + step, rank)
        step //= 2
    return rank


def _before(x: torch.Tensor, y: torch.Tensor, *, descending: bool) -> torch.Tensor:
    """Whether x comes strictly before y; NaN is the largest, and equal to itself."""
    large, small = (x, y) if descending else (y, x)
    exceeds = large > small
    return exceeds | ((large != large) & (small == small)) if x.is_floating_point() else exceeds
