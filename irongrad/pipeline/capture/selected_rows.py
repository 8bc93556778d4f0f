"""Rows that a mask selects, `x[mask]`, kept at the shape of all rows for as long as each row is computed by itself.

The shape of `x[mask]`, which is `x.masked_select(mask)`, depends on values. But `out[mask] = f(x[mask])` does not need
it, nor does `f(x[mask]).mean()`. So `x[mask]` gives all rows here. Functions of each element go on with all rows; a
write through the same mask, a sum, a mean and the losses of `torch.nn.functional` take those that the mask selects. Any
other function would need the real `x[mask]`, and is refused.

Rows that are not selected repeat the first selected one. So a function computes nothing there that it does not compute
for a selected row: no NaN whose gradient would reach a parameter. If none is selected, all are ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from irongrad.diagnostics.advice import KEEP_SHAPE, VALUES_AS_SHAPE
from irongrad.diagnostics.refusals import gathers
from irongrad.diagnostics.source_lines import here
from irongrad.pipeline.capture.origins import Origins, is_of_each_element, version_of
from irongrad.runtime.errors import UnsupportedOpError

_SUMS = frozenset({torch.sum, Tensor.sum})
_MEANS = frozenset({torch.mean, Tensor.mean})
_LOSSES: frozenset[object] = frozenset(
    {
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
    }
)
_SELECTIONS: frozenset[object] = frozenset({torch.masked_select, Tensor.masked_select})
_OF_CLASSES: frozenset[object] = frozenset({functional.cross_entropy, functional.nll_loss})


@dataclass(frozen=True)
class _Mask:
    """A mask that selected rows, as it was then, and the user's line that used it."""

    tensor: Tensor
    version: int
    line: str

    @property
    def rows(self) -> Tensor:
        """Whether each row is selected."""
        return self.tensor.reshape(-1)


_MASKS = WeakTensorKeyDictionary()  # of all traces: what leaves a trace is checked outside of it


def _leaves(mask: _Mask) -> UnsupportedOpError:
    """The refusal of a function that needs the rows themselves, with its line and the line that selects them."""
    line = here()
    selected = "" if line == mask.line else f"this line takes the rows that {mask.line} selects, but "
    return UnsupportedOpError(
        f"{line}\n  {selected}{VALUES_AS_SHAPE} {KEEP_SHAPE}. So out[mask] = f(x[mask]) is "
        "out = torch.where(mask, f(x), out)"
    )


def refuse_selected(*values: object) -> None:
    """Refuse tensors that stand for `x[mask]` where they leave the functions that know them.

    Raises:
        UnsupportedOpError: there is one; with the line that selects.
    """
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor) and tensor in _MASKS:
            raise UnsupportedOpError(f"{_MASKS[tensor].line}\n  {VALUES_AS_SHAPE} {KEEP_SHAPE}")


class SelectedRows:
    """The tensors of one trace that stand for `x[mask]`; masks that are computed alike are equal."""

    def __init__(self, origins: Origins) -> None:
        self._masks = _MASKS
        self._origins = origins

    def _is_same(self, mask: _Mask, key: Any) -> bool:
        """Whether `key` has the values that a mask had when it selected rows: `out[h > 0] = h[h > 0]`."""
        return version_of(mask.tensor) == mask.version and self._origins.are_equal(mask.tensor, key)

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that selects rows or takes selected rows; NotImplemented for any other call."""
        if function is Tensor.__getitem__ and not self._is_selected(args[0]) and _is_mask_of(*args):
            return self._select(*args)
        if function in _SELECTIONS and len(args) == 2 and not any(map(self._is_selected, args)):
            wide = torch.broadcast_tensors(*args)
            return self._select(*wide) if _is_mask_of(*wide) else NotImplemented
        masks = [self._masks[t] for t in tree_leaves((args, kwargs)) if self._is_selected(t)]
        if not masks:
            return NotImplemented
        if all(self._is_same(masks[0], m.tensor) for m in masks):
            result = self._computed(function, masks[0], args, kwargs)
            if result is not NotImplemented:
                return result
        if not gathers():
            raise _leaves(masks[0])
        real = tree_map_only(Tensor, lambda t: t[self._masks[t].rows] if self._is_selected(t) else t, (args, kwargs))
        return function(*real[0], **real[1])

    def _is_selected(self, value: object) -> bool:
        return isinstance(value, Tensor) and value in self._masks

    def _select(self, input: Tensor, mask: Tensor) -> Tensor:
        rows = input.reshape(-1, *input.shape[mask.ndim :])
        first = mask.reshape(-1).to(torch.float32).argmax().reshape(1)
        others = torch.where(mask.any(), rows.detach().index_select(0, first), int(input.is_floating_point()))
        filled = torch.where(_beside(mask.reshape(-1), rows), rows, others.to(rows.dtype))
        self._masks[filled] = _Mask(mask, mask._version, here())
        return filled

    def _computed(
        self, function: Callable[..., Any], mask: _Mask, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a function that treats each row by itself, or reduces all elements."""
        if function is Tensor.__setitem__:
            return self._assign(mask, *args)
        if function in _LOSSES:
            return self._mean_or_sum(function, mask, args, kwargs)
        if function in _OF_CLASSES:
            return self._loss_of_classes(function, mask, *args, **kwargs)
        if function in _SUMS | _MEANS and len(args) == 1 and not kwargs:
            return _reduced(args[0], mask, "mean" if function in _MEANS else "sum")
        if not is_of_each_element(function) or not self._are_aligned(args, kwargs):
            return NotImplemented
        result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._masks[tensor] = mask
        return result

    def _are_aligned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether selected rows have one rank, and other tensors are the same for each row."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        ranks = {t.ndim for t in tensors if self._is_selected(t)}
        others = [t.ndim for t in tensors if not self._is_selected(t)]
        return (
            len(ranks) == 1 and max(others, default=-1) < min(ranks) and self._is_selected(tensors[0] if args else None)
        )

    def _assign(self, mask: _Mask, target: Tensor, key: object, value: Tensor) -> Any:
        if self._is_selected(target) or not _is_mask_of(target, key) or not self._is_same(mask, key):
            return NotImplemented
        rows = value.to(target.dtype).reshape(target.shape)
        return target.copy_(torch.where(_beside(mask.tensor, target), rows, target))

    def _mean_or_sum(
        self, function: Callable[..., Any], mask: _Mask, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        reduction = kwargs.get("reduction", "mean")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if len(args) != 2 or not all(map(self._is_selected, tensors)) or args[0].shape != args[1].shape:
            return NotImplemented
        losses = function(*args, **{**kwargs, "reduction": "none"})
        return _reduced(losses, mask, reduction)

    def _loss_of_classes(
        self, function: Callable[..., Any], mask: _Mask, input: Tensor, target: Tensor, **options: Any
    ) -> Any:
        reduction, ignored = options.get("reduction", "mean"), options.get("ignore_index", -100)
        is_plain = options.get("weight") is None and self._is_selected(input) and self._is_selected(target)
        if not is_plain or input.ndim != 2 or target.ndim != 1:
            return NotImplemented
        losses = function(input, target, **{**options, "reduction": "none"})
        counted = _Mask(counts := mask.rows & (target != ignored), counts._version, mask.line)
        return _reduced(losses, counted, reduction)


def _reduced(rows: Tensor, mask: _Mask, reduction: str) -> Any:
    """The sum or the mean of all elements of the selected rows."""
    if reduction not in ("mean", "sum"):
        return NotImplemented
    selected = _beside(mask.rows, rows)
    total = torch.where(selected, rows, torch.zeros_like(rows)).sum()
    return total / selected.expand_as(rows).sum() if reduction == "mean" else total


def _beside(mask: Tensor, rows: Tensor) -> Tensor:
    """A mask with the rank of what it masks."""
    return mask.reshape(*mask.shape, *[1] * (rows.ndim - mask.ndim))


def _is_mask_of(input: object, key: object) -> bool:
    """Whether `key` is a mask over the first dimensions of `input`, and all sizes are known."""
    if not (isinstance(input, Tensor) and isinstance(key, Tensor) and key.dtype is torch.bool and key.ndim):
        return False
    is_known = all(isinstance(size, int) for size in (*input.shape, *key.shape))
    return is_known and input.shape[: key.ndim] == key.shape and key.numel() > 0
