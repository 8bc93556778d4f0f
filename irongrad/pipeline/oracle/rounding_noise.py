"""Simulate the rounding of other code in a run of eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.graph.movements import ANY, Movement, names, operators
from irongrad.operators.legalize.half_precision import HALVES
from irongrad.operators.random import is_random
from irongrad.pipeline.oracle.near_ties import NearTies, compares, tiled
from irongrad.runtime.tolerance import NOISE_ULPS, NOISE_ULPS_OF_HALVES

_STRETCH = 1 << 17

# A number so large may hide others, such as -1e9 in a mask of attention. An operator that works on single elements
# rounds equal ones equally, so they get equal noise. With noise of their own, hidden scores would differ by more than
# any score does. A row of which all is hidden could then have any weights, and verification would see no wrong ones.
_HIDES = 1e4

# A finite number so large, or half as large as the largest of its dtype, gets no noise: no code rounds it, and noise
# may make it infinite.
_LARGEST = 1e29

# A prime: it spreads the bits of a number over the noise.
_SPREAD = 2_654_435_761
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOPK = torch.ops.aten.topk.default
_CAST = torch.ops.aten._to_copy.default

# Copies, an operator whose second result is a floating-point mask, and new tensors of one number: a binary
# cross-entropy refuses labels above 1. Others that only move values get noise, too: it stands for that of what reads
# them.
_EXACT_OPERATORS = operators(Movement.COPY | Movement.OVERWRITE) | {
    *(getattr(torch.ops.aten, n).default for n in ("ones", "ones_like", "new_ones", "full", "full_like", "new_full")),
    torch.ops.aten.multilabel_margin_loss_forward.default,
}

# Lookups of rows. A half-precision row gets no noise: it may be widened at once, as that of a table which is stored in
# bfloat16, and noise of bfloat16 would be a thousand times that of what reads it.
_LOOKUPS = operators(Movement.GATHER)

# Operators that subtract sums which they compute inside. Decomposed, each part gets its own noise. Noise on the result
# alone is proportional to it, so it would be zero too where the difference is zero but for rounding.
_FUSED = get_decompositions(
    [
        torch.ops.aten.native_batch_norm,
        torch.ops.aten.native_group_norm,
        torch.ops.aten.native_layer_norm,
        torch.ops.aten.native_batch_norm_backward,
        torch.ops.aten.native_group_norm_backward,
        torch.ops.aten.native_layer_norm_backward,
        torch.ops.aten._softmax_backward_data,
        torch.ops.aten._log_softmax_backward_data,
    ]
)


# Convolutions, with the place of the weight and of the stride among their arguments.
_CONVOLUTIONS = {torch.ops.aten.convolution.default: (1, 3), torch.ops.aten.convolution_backward.default: (2, 4)}


@dataclass(frozen=True)
class _Role:
    """What is known of an operator, for all its calls.

    Attributes:
        parts: what computes the operator in parts; None for an operator that gets noise as a whole.
        compares: whether near ties may decide its result.
        is_exact: whether it rounds nothing. A draw counts as exact: a mask is 0 or 1, and a uniform number below 1.
        is_lookup: whether it looks up rows.
        is_elementwise: whether equal elements become equal ones, or stay what they are.
        convolution: the places of the weight and of the stride of a convolution; None for other operators.
    """

    parts: Callable[..., Any] | None
    compares: bool
    is_exact: bool
    is_lookup: bool
    is_elementwise: bool
    convolution: tuple[int, int] | None


@cache  # in a small step, to look an operator up in so many tables would take longer than to run it
def _role_of(operator: torch._ops.OpOverload) -> _Role:
    name = operator._schema.name.split("::")[1].rstrip("_")
    return _Role(
        parts=_FUSED.get(operator),
        compares=compares(operator),
        is_exact=is_random(operator) or operator.is_view or operator in _EXACT_OPERATORS,
        is_lookup=operator in _LOOKUPS,
        # torch 2.13 tags not all such operators.
        is_elementwise=torch.Tag.pointwise in operator.tags or name in names(ANY),
        convolution=_CONVOLUTIONS.get(operator),
    )


class RoundingNoise(TorchDispatchMode):
    """Multiply every computed floating-point value by 1 + u, |u| up to `NOISE_ULPS` last-place units of its dtype.

    Compiled code sums in a different order, which perturbs the last bits by about this much. Half-precision values get
    less noise (`NOISE_ULPS_OF_HALVES`). This is Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic", UCLA
    CSD-970002, 1997): the spread of such runs shows how far rounding alone may move each result.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._ties = NearTies(seed)
        # Drawing a number for every value would take longer than the run, so each tensor uses a stretch of these.
        self._units = _drawn(seed)
        self._factors: dict[torch.dtype, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        role = _role_of(func)
        if role.parts is not None:
            with self:
                return role.parts(*args, **(kwargs or {}))
        if role.compares and self._ties.decides(func, args):
            with torch._C.DisableTorchFunction():
                result = self._ties.decided(func, args, kwargs or {})
        else:
            result = self._topk(*args, **(kwargs or {})) if func is _TOPK else func(*args, **(kwargs or {}))
        if role.is_exact or (role.is_lookup and result.dtype in HALVES) or _converts_whole_numbers(func, args):
            return result
        with torch._C.DisableTorchFunction():  # or every TorchFunctionMode would see the operators of the noise
            tensors = [result] if isinstance(result, torch.Tensor) else torch.utils._pytree.tree_leaves(result)
            for tensor in tensors if role.convolution and _may_be_winograd(*role.convolution, args) else ():
                if isinstance(tensor, torch.Tensor) and tensor.ndim == 4:
                    self._perturb_by_neighbours(tensor)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not _is_count(func, result):
                    self._perturb(tensor, like_elements_alike=role.is_elementwise)
        return result

    def _topk(self, x: torch.Tensor, k: int, dim: int = -1, *rest: bool) -> Any:
        """Choose at random among equal elements: PyTorch leaves open which of them are the largest."""
        order = list(range(x.shape[dim])) if x.ndim else []
        self._random.shuffle(order)
        if len(order) < 2:
            return _TOPK(x, k, dim, *rest)
        places = torch.tensor(order, device=x.device)
        values, indices = _TOPK(x.index_select(dim, places), k, dim, *rest)
        return values, places[indices]

    def _perturb(self, tensor: torch.Tensor, *, like_elements_alike: bool) -> None:
        if tensor._is_zerotensor() or tensor.is_meta:
            # Autograd's zero tensor has no memory: torch 2.13 ends the process on a write to it. On tensors without
            # memory, forward-mode derivatives compute shapes.
            return
        large = _from(_HIDES if like_elements_alike else _largest(tensor.dtype), tensor)
        alike = None if large is None else self._alike(tensor[large])
        self._multiply(tensor)
        if large is not None:
            tensor[large] = alike

    def _alike(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers with noise that is the same for equal ones; none for those that are too large."""
        places = (numbers.view(_BITS[numbers.itemsize]).long() * _SPREAD).remainder(2 * _STRETCH)
        noisy = (numbers * self._factors_of(numbers.dtype)[places]).to(numbers.dtype)
        return torch.where(numbers.abs() >= _largest(numbers.dtype), numbers, noisy)

    def _multiply(self, tensor: torch.Tensor) -> None:
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

    def _perturb_by_neighbours(self, images: torch.Tensor) -> None:
        """Add noise in proportion to the root mean square of each image or filter, [_, _, H, W].

        Winograd's sums add numbers of a whole tile, and subtract them again. An element that is zero, as few of its
        terms are not, gets their rounding errors. These are 2 to 4 last-place units of the root mean square.
        """
        start = self._random.randrange(_STRETCH)
        units = tiled(self._units[start : start + _STRETCH], images.shape)
        scale = images.square().mean((2, 3), keepdim=True).sqrt() * (NOISE_ULPS * torch.finfo(images.dtype).eps)
        images.add_(units.to(images.dtype) * scale.nan_to_num_(0.0, 0.0, 0.0))

    def _factors_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._factors:
            wide = torch.promote_types(dtype, torch.float32)
            ulps = NOISE_ULPS_OF_HALVES if dtype in HALVES else NOISE_ULPS
            self._factors[dtype] = 1 + self._units.to(wide) * (ulps * torch.finfo(dtype).eps)
        return self._factors[dtype]


@lru_cache(8)
def _drawn(seed: int) -> torch.Tensor:
    """Numbers from -1 to 1, which nothing writes; no mode sees how they are drawn."""
    generator = torch.Generator().manual_seed(seed)
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        return torch.rand(2 * _STRETCH, generator=generator, device="cpu") * 2 - 1


def _from(least: float, tensor: torch.Tensor) -> torch.Tensor | None:
    """Which elements are finite and as large as `least`, or larger; None if none is."""
    if not torch.linalg.vector_norm(tensor).item() >= least:  # the largest element would take ten times as long
        return None
    found = (tensor.abs() >= least) & tensor.isfinite()
    return found if found.any() else None


def _largest(dtype: torch.dtype) -> float:
    return min(_LARGEST, float(torch.finfo(dtype).max) / 2)


def _may_be_winograd(weight_at: int, stride_at: int, args: tuple[Any, ...]) -> bool:
    """Whether Winograd's minimal filtering applies to a convolution, or to its gradients."""
    weight, stride = args[weight_at], args[stride_at]
    return bool(weight.dtype == torch.float32 and weight.shape[2:] == (3, 3) and set(stride) == {1})


def _converts_whole_numbers(operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an operator converts integers or truth values. It rounds none: labels of 0 and 1 stay probabilities."""
    return operator is _CAST and not (args[0].is_floating_point() or args[0].is_complex())


def _is_count(operator: torch._ops.OpOverload, result: object) -> bool:
    """Whether the result is a scalar that is updated in place, such as an optimizer's step count."""
    return isinstance(result, torch.Tensor) and result.ndim == 0 and operator._schema.is_mutable


@contextmanager
def noise_errors_suppressed(seed: int | None, note: Callable[[Exception], object] = bool) -> Iterator[None]:
    """End a noisy run (`seed` is not None) at an operator that refuses its perturbed arguments.

    Binary cross-entropy refuses a probability one unit in the last place above 1. A quantile refuses the position after
    the last element. If no noisy run computes a value, `irongrad.pipeline.oracle.oracle.Spread` says so.

    Args:
        seed: the seed of the noise.
        note: gets the error that ended the run.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if seed is None:
            raise
        note(error)
