"""`x[i]` in an update, with indices of rank 0: eager reads them as numbers, and gives a view.

A trace has no value for `i`. So it gathers a copy, and writes the copy back whenever something changes it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from irongrad.diagnostics.source_lines import here
from irongrad.runtime.errors import CaptureError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class _Copy:
    """What a copy was gathered from, and the values of both by then."""

    whole: Tensor
    indices: Sequence[Tensor | None]
    value_of_whole: Tensor
    value: Tensor


class IndexedCopies:
    """The copies of one trace that stand for views `x[i]`."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def called(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The result of a call that indexes by tensors of rank 0; NotImplemented for any other call."""
        if function not in (Tensor.__getitem__, Tensor.__setitem__) or (indices := _indices(*args[:2])) is None:
            return NotImplemented
        whole = args[0]
        if function is Tensor.__getitem__:
            made = torch.ops.aten.index.Tensor(whole, indices)
            self._note(made, whole, indices)
            return made
        return torch.ops.aten.index_put_.default(whole, indices, args[2].to(whole.dtype))

    def refuse_stale(self, values: Any) -> None:
        """Refuse copies whose whole has changed: a view would have changed with it.

        Raises:
            CaptureError: there is one; names the line that reads it.
        """
        for copy in self._known(values):
            if _value(self._copies[copy].whole) is not self._copies[copy].value_of_whole:
                raise CaptureError(
                    f"{here()}\n  x[i] with a tensor i was read before x changed, and is used after that. In eager it "
                    "is a view, and changes with x. Read it again, or take x[i].clone() for the value before"
                )

    def write_back(self, values: Any) -> None:
        """Write copies that have changed into what they were gathered from."""
        for copy in self._known(values):
            found = self._copies[copy]
            if _value(copy) is not found.value:
                torch.ops.aten.index_put_.default(found.whole, found.indices, copy)
                self._note(copy, found.whole, found.indices)

    def _known(self, values: Any) -> list[Tensor]:
        return [v for v in tree_leaves(values) if isinstance(v, Tensor) and v in self._copies] if self._copies else []

    def _note(self, copy: Tensor, whole: Tensor, indices: Sequence[Tensor | None]) -> None:
        self._copies[copy] = _Copy(whole, indices, _value(whole), _value(copy))


def _value(tensor: Tensor) -> Tensor:
    """The functional value that a tensor of the trace has now: another one after each change."""
    torch._sync(tensor)
    value: Tensor = torch._from_functional_tensor(tensor)
    return value


def _indices(whole: Tensor, key: Any) -> list[Tensor | None] | None:
    """The index of each dimension up to the last; None unless all are of rank 0, or take the whole dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if not any(isinstance(k, Tensor) for k in keys):
        return None
    if sum(k is Ellipsis for k in keys) == 1:
        place = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[place : place + 1] = [slice(None)] * (whole.ndim - len(keys) + 1)
    found = [_index(k) for k in keys]
    return None if any(i is NotImplemented for i in found) else found


def _index(key: Any) -> Any:
    # IREE 3.13.0 cannot write into a part of a slice, so slices of a part are left to PyTorch, which refuses them here.
    if isinstance(key, slice):
        return None if key == slice(None) else NotImplemented
    if isinstance(key, int) and not isinstance(key, bool):
        return torch.full((), key, dtype=torch.int64)
    is_number = isinstance(key, Tensor) and key.ndim == 0 and key.dtype in _INTEGERS
    return key if is_number else NotImplemented
