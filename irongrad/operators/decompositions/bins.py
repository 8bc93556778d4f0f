"""Positions of values in sorted boundaries, and histograms: every value is compared with every boundary."""

from __future__ import annotations

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten


@decomposes(aten.searchsorted.Tensor)
def _searchsorted(
    boundaries: torch.Tensor,
    x: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """The number of boundaries below each value (`right`: below or equal). NaN counts all of them, as in eager."""
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    if boundaries.ndim > 1:
        boundaries = boundaries.unsqueeze(-2)
    reached = boundaries > x.unsqueeze(-1) if right or side == "right" else boundaries >= x.unsqueeze(-1)
    return (~reached).to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


@decomposes(aten.bucketize.Tensor)
def _bucketize(
    x: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


@decomposes(aten.histc.default)
def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Find each value's bin by interpolation between the outer edges (ATen, HistogramKernel.cpp).

    The last bin includes its upper edge.
    """
    x = x.reshape(-1)
    if min != max:
        low, high = x.new_full([], min), x.new_full([], max)
    elif x.numel():
        low, high = x.amin(), x.amax()
        low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    else:
        return x.new_zeros(bins)
    bin_index = ((x - low) * bins / (high - low)).clamp(0, bins - 1).to(torch.int64)
    within = (x >= low) & (x <= high)
    one_hot = (bin_index.unsqueeze(1) == torch.arange(bins, device=x.device)) & within.unsqueeze(1)
    return one_hot.to(torch.int64).sum(0).to(x.dtype)
