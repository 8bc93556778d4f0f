"""A stack of tensors as one elementwise function, which IREE fuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stack_by_position(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """`torch.stack(parts, dim)` as one elementwise function of the parts and of a position.

    IREE 3.13.0 computes the parts of a stack by themselves and copies each to where it belongs; along an inner
    dimension slowly.
    """
    if len(parts) == 1:
        return parts[0].unsqueeze(dim)
    shape = [1] * (parts[0].ndim + 1)
    shape[dim] = len(parts)
    place = torch.arange(len(parts)).reshape(shape)
    *others, result = [part.unsqueeze(dim) for part in parts] if dim else parts  # broadcasting makes the first
    for i, part in list(enumerate(others))[::-1]:
        result = torch.where(place == i, part, result)
    return result
