"""Replacements for PyTorch functions that read a tensor's values without need.

These functions are C++ code above the operators that a trace sees, so they are replaced where Python calls them. They
find known sizes with `masked_select`, check the sign of a weight, or start a slice at a tensor's value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import irongrad.pipeline.capture.fake_shapes  # noqa: F401 (registers them)
from irongrad.diagnostics.source_lines import here
from irongrad.operators.decompositions.scatter import put_by_mask
from irongrad.pipeline.capture import changed_memory, data_attribute, raising_decisions
from irongrad.pipeline.capture.byte_masks import as_boolean
from irongrad.pipeline.capture.held_tensors import HeldTensors
from irongrad.pipeline.capture.known_values import KnownValues
from irongrad.pipeline.capture.origins import Origins
from irongrad.pipeline.capture.selected_rows import SelectedRows
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.sizes.symbols import has_symbols

_EQUALITIES = (torch.equal, Tensor.equal)
_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
_REPLACED: dict[object, Callable[..., Any]] = {Tensor.data.__get__: data_attribute.read, **changed_memory.REPLACED}


class ValueFree(TorchFunctionMode):
    """While open, calls of these functions read no values, and torch.distributions does not validate arguments.

    Args:
        module: the module that is traced; None for a function.
        known: the values that are known in the trace; None for none.
    """

    def __init__(self, module: nn.Module | None = None, known: KnownValues | None = None) -> None:
        super().__init__()
        self._known = known
        self._held = HeldTensors(module) if module is not None else None
        self._replaced: dict[object, Callable[..., Any]] = {
            **_REPLACED,
            Tensor.data.__set__: partial(data_attribute.assign, module),
        }
        self._origins = Origins()
        self._rows = SelectedRows(self._origins)
        self._validated: list[bool] = []  # a stack: PyTorch may enter one mode several times

    def __enter__(self) -> ValueFree:
        self._validated.append(Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        Distribution.set_default_validate_args(self._validated.pop())
        super().__exit__(*exception)

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ):
        """Call the replacement of `func`, or `func` itself if there is none for these arguments."""
        args, kwargs = as_boolean(func, args, kwargs or {})
        if torch.compiler.is_dynamo_compiling():  # Dynamo traces this function, too
            return self._replacing(func, args, kwargs)
        if func in _EQUALITIES and len(args) == 2 and self._origins.are_equal(*args):
            return True
        known = self._known
        if known is None:
            return self._called(func, args, kwargs)
        if self._held is not None:
            args, kwargs = self._held.exchanged(args, kwargs)
        if (answer := known.answer(func, args, kwargs)) is not NotImplemented:
            return answer
        if func in _INDEXED:
            args = (args[0], known.indices(args[1]), *args[2:])
        buffers = known.sources(func, args, kwargs)
        result = self._called(func, args, kwargs)
        if buffers is not None:
            known.follow(func, args, kwargs, result, buffers)
        return result

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._rows.called(func, args, kwargs)
        if result is NotImplemented:
            result = self._replacing(func, args, kwargs)
            self._origins.note(func, args, kwargs, result)
        return result

    def _replacing(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        replacement = self._replaced.get(func)
        result = replacement(*args, **kwargs) if replacement is not None else NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result


def _replaces(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        _REPLACED.update(dict.fromkeys(functions, replacement))
        return replacement

    return register


@_replaces(Tensor.requires_grad_, Tensor.requires_grad.__set__)
def _requires_grad(input: Tensor, requires_grad: bool = True) -> object:
    """Refuse to freeze or unfreeze a parameter while the step runs: it would happen once, at capture."""
    if isinstance(input, nn.Parameter) and input.requires_grad != requires_grad:
        raise CaptureError(
            f"{here()}\n  the forward changes requires_grad of a parameter, which a compiled step cannot do. Change it "
            "before compiling, once, or use tensor.detach()"
        )
    return NotImplemented


@_replaces(torch._assert_async)
def _assert_async(condition: Tensor, message: str = "") -> None:
    raising_decisions.asserted(condition, message)


@_replaces(torch._assert)
def _assert(condition: object, message: object) -> object:
    """Assert a condition whose value is not known; the assertion of another one is Python's."""
    if not isinstance(condition, Tensor) or condition.numel() != 1:
        return NotImplemented
    raising_decisions.asserted(condition, str(message))
    return None


@_replaces(Tensor.__bool__)
def _bool(condition: Tensor) -> object:
    return raising_decisions.decided(condition)


@_replaces(torch.narrow, Tensor.narrow)
def _narrow(input: Tensor, dim: int, start: int | Tensor, length: int) -> Tensor:
    if not isinstance(start, Tensor):
        return NotImplemented
    start = torch.where(start < 0, start + input.shape[dim], start)
    return input.index_select(dim, start + torch.arange(length, device=input.device))


@_replaces(torch.tensor_split, Tensor.tensor_split)
def _tensor_split(input: Tensor, places: int | Sequence[int] | Tensor, dim: int = 0) -> object:
    if not isinstance(places, Tensor):
        return NotImplemented
    raise UnsupportedOpError(
        "aten.tensor_split with a tensor of places cannot be compiled: the shapes of its results depend on values. "
        "Give the places as a tuple of numbers"
    )


@_replaces(torch.combinations)
def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    if r == 0:
        return input.new_empty([0])
    table = list(choose(range(input.shape[0]), r))
    places = torch.tensor(table, dtype=torch.int64, device=input.device)
    return input.index_select(0, places.reshape(-1)).reshape(-1, r)


@_replaces(torch.cov, Tensor.cov)
def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """The covariance of the rows; columns are weighted by frequency (`fweights`) and by importance (`aweights`)."""
    rows = input.reshape(1, -1) if input.ndim < 2 else input
    weightings = [w for w in (fweights, aweights) if w is not None]
    weights = (
        torch.stack([w.to(rows.dtype) for w in weightings]).prod(0) if weightings else rows.new_ones(rows.shape[1])
    )
    total = weights.sum()
    centred = rows - ((rows * weights).sum(1) / total).unsqueeze(1)
    lost = correction * (weights * aweights).sum() / total if aweights is not None else correction
    norm = (total - lost).clamp_min(0)
    if rows.shape[0] == 1:  # IREE 3.13.0 cannot pack a product of rank 0 into tiles
        return (centred * centred.conj() * weights).sum() / norm
    return (centred @ (centred * weights).mT.conj()) / norm


@_replaces(torch.corrcoef, Tensor.corrcoef)
def _corrcoef(input: Tensor) -> Tensor:
    covariance = _cov(input)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation.unsqueeze(1) / deviation).clamp(-1, 1)


@_replaces(torch.index_fill, Tensor.index_fill)
def _index_fill(input: Tensor, dim: int, index: Tensor, value: float | Tensor) -> Tensor:
    """Fill by a mask.

    PyTorch's gradient of a tensor `value` selects the unique indices, whose number depends on values.
    """
    if not isinstance(value, Tensor) or not isinstance(dim, int):
        return NotImplemented
    if input.ndim == 0:
        return torch.where((index == 0).any() | (index == -1).any(), value, input)
    size = input.shape[dim]
    index = torch.where(index < 0, index + size, index).reshape(-1, 1)
    hit = (index == torch.arange(size, device=input.device)).any(0)
    return torch.where(hit.reshape([-1] + [1] * (input.ndim - 1 - dim % input.ndim)), value, input)


@_replaces(torch.index_put, Tensor.index_put)
def _index_put(input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    if sum(i is not None for i in indices) != 1 or not any(_is_mask(i) for i in indices):
        return NotImplemented
    return put_by_mask(input, indices, values, accumulate)


@_replaces(torch.index_put_, Tensor.index_put_)
def _index_put_(input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    result = _index_put(input, indices, values, accumulate)
    return result if result is NotImplemented else input.copy_(result)


@_replaces(Tensor.__setitem__)
def set_by_mask(input: Tensor, key: Any, value: Any) -> object:
    """`input[key] = value` by a mask; NotImplemented for any other key."""
    keys = key if isinstance(key, tuple) else (key,)
    if not _is_mask(keys[-1]) or any(k != slice(None) for k in keys[:-1]):
        return NotImplemented
    if isinstance(value, Tensor) and free_unbacked_symbols(value):
        raise UnsupportedOpError(
            f"{here()}\n  the shape of x[mask] depends on values. Keep the shape: out[mask] = f(x[mask]) is "
            "out = torch.where(mask, f(x), out)"
        )
    values = value if isinstance(value, Tensor) else torch.full([], value, dtype=input.dtype, device=input.device)
    return input.copy_(put_by_mask(input, [*[None] * (len(keys) - 1), keys[-1]], values, False))


@_replaces(functional.one_hot)
def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Set a one at each class; PyTorch asserts that the classes are in range, for which there are guards here."""
    if num_classes < 1 or tensor.dtype is not torch.int64:
        return NotImplemented
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _of_byte_classes(loss: Callable[..., Tensor]) -> None:
    """Let `loss` take classes of dtype uint8: eager does, but what PyTorch traces it as gathers by wider integers."""

    @_replaces(loss)
    def replaced(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if target.dtype is not torch.uint8:
            return NotImplemented
        return loss(input, target.long(), *args, **kwargs)


_of_byte_classes(functional.cross_entropy)
_of_byte_classes(functional.nll_loss)


@_replaces(functional.gaussian_nll_loss)
def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """The functional of that name, without its check of a tensor `var` for negative values.

    As in PyTorch, the gradient of `var` ignores the bound `eps`.
    """
    if not isinstance(var, Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    if var.shape == input.shape[:-1] and var.shape != input.shape:
        var = var.unsqueeze(-1)
    bounded = var.clone()
    with torch.no_grad():
        bounded.clamp_(min=eps)
    loss = 0.5 * (bounded.log() + (input - target).square() / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


@_replaces(functional.ctc_loss)
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute the mean for lengths that are numbers.

    PyTorch writes these numbers into a tensor in C++, but a tensor in a trace has no memory.
    """
    if isinstance(target_lengths, Tensor) or reduction != "mean":
        return NotImplemented
    losses = functional.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)
    return (losses / torch.tensor(target_lengths, dtype=losses.dtype).clamp(min=1)).mean()


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool


# The functions below are composites in C++, where torch 2.13 reads symbolic sizes as numbers.


@_replaces(functional.max_pool1d, torch.max_pool1d)
def _max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if not has_symbols(input):
        return NotImplemented
    window = (kernel_size, stride or kernel_size, padding, dilation)
    kernel, stride, padding, dilation = ((v,) if isinstance(v, int) else tuple(v) for v in window)
    image = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation), ceil_mode
    if not return_indices:
        return functional.max_pool2d(input.unsqueeze(-2), *image).squeeze(-2)
    result, indices = functional.max_pool2d(input.unsqueeze(-2), *image, return_indices=True)
    return result.squeeze(-2), indices.squeeze(-2)


@_replaces(functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, torch.adaptive_avg_pool1d)
def _adaptive_avg_pool(input: Tensor, output_size: Any) -> Tensor:
    """Pool a contiguous tensor.

    For a channels-last image, eager gives a mean over the whole image channels-last strides.
    """
    if not has_symbols(input):
        return NotImplemented
    pool = functional.adaptive_avg_pool1d if input.ndim == 3 else functional.adaptive_avg_pool2d
    return pool(input.contiguous(), output_size)


@_replaces(torch.take_along_dim, Tensor.take_along_dim)
def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None or not has_symbols(input) or input.ndim != indices.ndim:
        return NotImplemented
    d = dim % input.ndim
    shape = [i if n == d or i != 1 else v for n, (v, i) in enumerate(zip(input.shape, indices.shape, strict=True))]
    whole = [v if n == d or v != 1 else i for n, (v, i) in enumerate(zip(input.shape, indices.shape, strict=True))]
    return input.expand(whole).gather(d, indices.expand(shape))


@_replaces(torch.linspace)
def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Count from both ends, as ATen does."""
    made = dtype or torch.get_default_dtype()
    numbers = isinstance(start, (int, float)) and isinstance(end, (int, float))
    if not isinstance(steps, torch.SymInt) or not numbers or not made.is_floating_point:
        return NotImplemented
    places = torch.arange(steps, dtype=made, device=options.get("device"))
    step = (end - start) / torch.sym_max(steps - 1, 1)
    return torch.where(places < (steps + 1) // 2, start + places * step, end - (steps - 1 - places) * step)


@_replaces(functional.affine_grid)
def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Map the points of one image, whose size is known."""
    samples, *image = size
    if not isinstance(samples, torch.SymInt) or any(isinstance(s, torch.SymInt) for s in image):
        return NotImplemented
    identity = torch.eye(len(image) - 1, len(image), dtype=theta.dtype, device=theta.device).unsqueeze(0)
    points = functional.affine_grid(identity, [1, *image], align_corners).flatten(0, -2)
    mapped = functional.pad(points, (0, 1), value=1.0) @ theta.mT
    return mapped.unflatten(1, image[1:])
