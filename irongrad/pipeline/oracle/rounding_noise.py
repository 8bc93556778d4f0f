"""Rounding as other code might do it, in a run of eager PyTorch."""

from __future__ import annotations

import random
from functools import cache

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.operators.legalize.half_precision import HALVES
from irongrad.operators.random import is_random
from irongrad.runtime.tolerance import NOISE_ULPS, NOISE_ULPS_OF_HALVES

_STRETCH = 1 << 17

# Operators that move values and round nothing, or have a floating-point mask as a result.
_MOVES = frozenset(
    {
        torch.ops.aten.clone.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.multilabel_margin_loss_forward.default,
    }
)

# Operators that subtract sums they make inside, in parts that round on their own. Where the difference is zero but for
# rounding, so is what noise on their results alone would add.
_FUSED = get_decompositions(
    [
        torch.ops.aten.native_batch_norm_backward,
        torch.ops.aten.native_group_norm_backward,
        torch.ops.aten.native_layer_norm_backward,
        torch.ops.aten._softmax_backward_data,
        torch.ops.aten._log_softmax_backward_data,
    ]
)


class RoundingNoise(TorchDispatchMode):
    """Multiply every computed floating-point value by 1 + u, |u| up to `NOISE_ULPS` last-place units of its dtype.

    So noisy are the last bits of compiled code, which sums in another order; half-precision ones are less noisy
    (`NOISE_ULPS_OF_HALVES`). This is Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic", UCLA CSD-970002,
    1997): the spread of such runs shows how far rounding alone may move each result.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        # Drawing a number for every value would take longer than the run: each tensor takes a random stretch of these.
        self._units = torch.rand(2 * _STRETCH, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self._factors: dict[torch.dtype, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in _FUSED:
            with self:
                return _FUSED[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if _is_exact(func):
            return result
        with torch._C.DisableTorchFunction():  # each mode of functions would see every operator of the noise
            tensors = [result] if isinstance(result, torch.Tensor) else torch.utils._pytree.tree_leaves(result)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not _is_count(func, result):
                    self._perturb(tensor)
        return result

    def _perturb(self, tensor: torch.Tensor) -> None:
        if tensor._is_zerotensor():
            return  # autograd's zero has no memory; torch 2.13 ends the process when it is written to
        start, size = self._random.randrange(_STRETCH), tensor.numel()
        factors = self._factors_of(tensor.dtype)
        if size <= _STRETCH:
            tensor.mul_(factors[start : start + size].view(tensor.shape))
            return
        flat, whole = tensor.reshape(-1), size - size % _STRETCH
        flat[:whole].view(-1, _STRETCH).mul_(factors[start : start + _STRETCH])
        flat[whole:].mul_(factors[start : start + size - whole])
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def _factors_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._factors:
            wide = torch.promote_types(dtype, torch.float32)
            ulps = NOISE_ULPS_OF_HALVES if dtype in HALVES else NOISE_ULPS
            self._factors[dtype] = 1 + self._units.to(wide) * (ulps * torch.finfo(dtype).eps)
        return self._factors[dtype]


@cache
def _is_exact(operator: torch._ops.OpOverload) -> bool:
    """Whether it rounds nothing: a draw is exact too, as a mask is 0 or 1, and a uniform number below 1."""
    return is_random(operator) or operator.is_view or operator in _MOVES


def _is_count(operator: torch._ops.OpOverload, result: object) -> bool:
    """Whether the result is a number that is updated in place, as an optimizer counts its steps."""
    return isinstance(result, torch.Tensor) and result.ndim == 0 and operator._schema.is_mutable
