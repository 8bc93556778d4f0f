"""Cumulative sums, products, maxima and similar scans.

A scan combines every element with all before it. IREE 3.13.0 scans in one serial chain, whose rounding error grows with
its length. Here a row is scanned by doubling distances (W. D. Hillis and G. L. Steele, "Data parallel algorithms",
Comm. ACM 29, 1986), in a chain of log2(n) combinations. A long row is split into blocks. First each block is scanned,
and then the last elements of the blocks. Finally each block is combined with the total of all blocks before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from irongrad.graph.recorder import undecomposed
from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import example_of, for_every_size, is_known

aten = torch.ops.aten

SHORTEST_SCANNED = 32  # for shorter rows, IREE's serial scan is accurate enough and takes one dispatch
BLOCK = 32

_State = tuple[torch.Tensor, ...]
_Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Combine = Callable[[_State, _State], _State]


@decomposes(aten.cumsum.default)
def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _arithmetic(aten.cumsum.default, torch.add, 0, x, dim, dtype)


@decomposes(aten.cumprod.default)
def _cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _arithmetic(aten.cumprod.default, torch.mul, 1, x, dim, dtype)


def _arithmetic(
    op: torch._ops.OpOverload,
    combine: _Two,
    neutral: int,
    x: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    if x.dtype != wanted or dtype is not None:
        return op(x.to(wanted), dim).to(wanted)  # of narrow integers it is int64, whose low bits are the result
    if x.ndim == 0 or x.numel() == 0:
        return x.clone()
    if dim < 0:
        return op(x, dim + x.ndim)
    if example_of(x.shape[dim]) < SHORTEST_SCANNED:
        return NotImplemented
    if not is_known(x.shape[dim]):
        return _in_blocks(op, combine, neutral, x, dim)
    return _scan(lambda a, b: (combine(a[0], b[0]),), (x,), dim)[0]


def _in_blocks(op: torch._ops.OpOverload, combine: _Two, neutral: int, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Scan a row whose length only a call knows in blocks, and the totals of the blocks in one chain.

    Zeros lengthen the row to whole blocks. They come last, so no element of the result has them in it.
    """
    last = x.movedim(dim, -1)
    length = last.shape[-1]
    count = (length + BLOCK - 1) // BLOCK
    with for_every_size(length):
        whole = aten.constant_pad_nd.default(last, [0, count * BLOCK - length]).unflatten(-1, (count, BLOCK))
        (blocks,) = _scan_block(lambda a, b: (combine(a[0], b[0]),), (whole,))
        with undecomposed():
            totals = op(blocks[..., -1], blocks.ndim - 2)
        before = torch.cat([torch.full_like(totals[..., :1], neutral), totals[..., :-1]], -1)
        row = combine(before.unsqueeze(-1), blocks).flatten(-2).narrow(-1, 0, length)
        # With the strides of whole blocks, later operators would ask whether the length is that of whole blocks.
        return row.clone(memory_format=torch.contiguous_format).movedim(-1, dim)


@decomposes(aten.cummax.default)
def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _extreme(torch.ge, x, dim)


@decomposes(aten.cummin.default)
def _cummin(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _extreme(torch.le, x, dim)


def _extreme(
    reaches: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running extreme and its index.

    Of equal elements the last one counts, and a NaN stays once it is met (ATen, `cummax_helper_cpu`).
    """
    if x.ndim == 0 or x.numel() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    if not is_known(x.shape[dim]):
        return _extreme_of_each(x, dim, largest=reaches is torch.ge)

    def later(one: _State, other: _State) -> _State:
        value, new = one[0], other[0]
        takes = reaches(new, value)
        if x.is_floating_point():
            takes = (new != new) | ((value == value) & takes)
        return torch.where(takes, new, value), torch.where(takes, other[1], one[1])

    places = torch.arange(x.shape[dim], device=x.device).reshape([-1] + [1] * (x.ndim - 1 - dim % x.ndim))
    value, index = _scan(later, (x, places.expand(x.shape)), dim)
    return value, index


def _extreme_of_each(x: torch.Tensor, dim: int, *, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_extreme`, of a row whose length only a call knows: each element looks at all before it."""
    last = x.movedim(dim, -1).unsqueeze(-2)
    places, seen = _seen(last)
    before = torch.where(seen, last, last[..., :1])  # the first element, which is seen from everywhere, changes nothing
    value = (before.amax if largest else before.amin)(-1, keepdim=True)
    alike = last == value
    if x.is_floating_point():
        alike = alike | ((last != last) & (value != value))
    index = torch.where(seen & alike, places, 0).amax(-1)
    return value.squeeze(-1).movedim(-1, dim), index.movedim(-1, dim)


def _seen(last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places along the last dimension, and for each place whether a place is it or comes before it."""
    places = torch.arange(last.shape[-1], device=last.device)
    return places, places <= places.unsqueeze(-1)


@decomposes(aten.logcumsumexp.default)
def _logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Scan with log(exp(a) + exp(b)), which is associative."""
    if x.ndim == 0 or x.numel() == 0:
        return x.clone()
    if not is_known(x.shape[dim]):
        last = x.movedim(dim, -1).unsqueeze(-2)
        return last.masked_fill(~_seen(last)[1], -math.inf).logsumexp(-1).movedim(-1, dim)
    return _scan(lambda a, b: (_log_add_exp(a[0], b[0]),), (x,), dim)[0]


def _log_add_exp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """log(exp(x) + exp(y)), computed from the larger operand so that nothing overflows; inf and NaN pass through."""
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    return torch.where(large.isfinite(), large + torch.log1p(torch.exp(small - large)), large)


def _scan(combine: _Combine, state: _State, dim: int) -> _State:
    """Scan `dim` with an associative `combine`."""
    last = tuple(s.movedim(dim, -1) for s in state)
    return tuple(s.movedim(-1, dim) for s in _scan_last(combine, last))


def _scan_last(combine: _Combine, state: _State) -> _State:
    """Scan the last dimension in blocks: within each block, over the last elements of the blocks, and both combined."""
    length = state[0].shape[-1]
    if length <= BLOCK:
        return _scan_block(combine, state)
    whole = length // BLOCK * BLOCK
    head = tuple(s[..., :whole].unflatten(-1, (-1, BLOCK)) for s in state)
    blocks = _scan_block(combine, head)
    before = _scan_last(combine, tuple(s[..., -1] for s in blocks))  # the total up to the end of each block
    rest = combine(tuple(s[..., :-1].unsqueeze(-1) for s in before), tuple(s[..., 1:, :] for s in blocks))
    first = tuple(torch.cat([s[..., 0, :], r.flatten(-2)], -1) for s, r in zip(blocks, rest, strict=True))
    if whole == length:
        return first
    tail = _scan_block(combine, tuple(s[..., whole:] for s in state))
    tail = combine(tuple(s[..., -1:] for s in before), tail)
    return tuple(torch.cat([f, t], -1) for f, t in zip(first, tail, strict=True))


def _scan_block(combine: _Combine, state: _State) -> _State:
    """Scan by Hillis and Steele: each element is combined with the element 1, 2, 4, ... places before it."""
    distance = 1
    while distance < state[0].shape[-1]:
        combined = combine(tuple(s[..., :-distance] for s in state), tuple(s[..., distance:] for s in state))
        state = tuple(torch.cat([s[..., :distance], c], -1) for s, c in zip(state, combined, strict=True))
        distance *= 2
    return state
