"""The gradient of attention in an eager run: that of a softmax where a mask of large numbers hides a whole row.

The kernel of torch 2.13 for CPUs computes the weights again as `exp(score - logsumexp)`. Where a mask adds the same
large negative number to all n scores of a row, the logarithm of n is lost in that sum: each weight is 1, and not 1 / n.
So the gradient is n times too large. Models of transformers have such rows for samples that are all padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# The error of a weight at which the logarithm of the number of columns is partly lost in the sum with the scores.
_LOST = 1e-4


def _backward(*args: Any, attn_mask: Tensor | None = None, scale: float | None = None) -> Any:
    if attn_mask is None or not _hides_a_row(args[5]):
        return _BACKWARD(*args, attn_mask=attn_mask, scale=scale)
    gradient, query, key, value = args[:4]
    return _gradients(gradient, (query, key, value), attn_mask, scale)


def _hides_a_row(logarithms: Tensor) -> bool:
    hidden = logarithms * torch.finfo(logarithms.dtype).eps < -_LOST
    return bool((hidden & logarithms.isfinite()).any())


def _gradients(
    gradient: Tensor, operands: tuple[Tensor, Tensor, Tensor], mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of attention with respect to its operands: the query, the key and the value."""
    query, key, value = operands
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = aten._safe_softmax.default(query @ key.mT * scale + mask, -1)
    of_weights = gradient @ value.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


SUBSTITUTES: Mapping[Any, Callable[..., Any]] = {_BACKWARD: _backward}
