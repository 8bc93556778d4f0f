"""A stack of tensors as one elementwise function, which IREE can fuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stack_by_position(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Compute `torch.stack(parts, dim)` as one elementwise function of the parts and of a position.

    IREE 3.13.0 computes each part of a stack separately and copies it into place. Along an inner dimension that copy is
    slow.
    """
    if len(parts) == 1:
        return parts[0].unsqueeze(dim)
    shape = [1] * (parts[0].ndim + 1)
    shape[dim] = len(parts)
    place = torch.arange(len(parts)).reshape(shape)
    *others, result = [part.unsqueeze(dim) for part in parts] if dim else parts  # broadcasting adds dimension 0
    for i, part in list(enumerate(others))[::-1]:
        result = torch.where(place == i, part, result)
    return result
