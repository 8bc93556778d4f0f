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

from irongrad.diagnostics.source_lines import here
from irongrad.runtime.errors import CaptureError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class _Copy:
    """A copy, what it was gathered from, and the values of both by then."""

    copy: Tensor
    whole: Tensor
    indices: Sequence[Tensor | None]
    value: Tensor
    value_of_whole: Tensor


class IndexedCopies:
    """The copies of one trace that stand for views `x[i]`."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}  # by memory: a view of a copy has the same

    def called(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The result of a call that indexes by tensors of rank 0; NotImplemented for any other call."""
        if function not in (Tensor.__getitem__, Tensor.__setitem__) or (indices := _indices(*args[:2])) is None:
            return NotImplemented
        whole = args[0]
        if function is Tensor.__getitem__:
            made = torch.ops.aten.index.Tensor(whole, indices)
            self._note(made, whole, [None if i is None else i.clone() for i in indices])
            return made
        written = whole.ndim - sum(i is not None for i in indices)
        values = args[2].to(whole.dtype)
        while values.ndim > written and values.shape[0] == 1:
            values = values.squeeze(0)
        return torch.ops.aten.index_put_.default(whole, indices, values)

    def refuse_stale(self, values: Any) -> None:
        """Refuse copies, and views of them, whose whole has changed: a view of it would have changed with it.

        Raises:
            CaptureError: there is one; names the line that reads it.
        """
        tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor)] if self._copies else []
        for found in filter(None, (self._copies.get(_memory(tensor)) for tensor in tensors)):
            if _value(found.whole) is not found.value_of_whole:
                raise CaptureError(
                    f"{here()}\n  x[i] with a tensor i was read before x changed, and is used after that. In eager it "
                    "is a view, and changes with x. Read it again, or take x[i].clone() for the value before"
                )

    def write_back(self) -> None:
        """Write copies that have changed into what they were gathered from, which may be a copy itself."""
        for found in reversed(self._copies.values()):
            if _value(found.copy) is not found.value:
                torch.ops.aten.index_put_.default(found.whole, found.indices, found.copy)
                self._note(found.copy, found.whole, found.indices)

    def _note(self, copy: Tensor, whole: Tensor, indices: Sequence[Tensor | None]) -> None:
        self._copies[_memory(copy)] = _Copy(copy, whole, indices, _value(copy), _value(whole))


def _memory(tensor: Tensor) -> int:
    """A number of the memory that a tensor of the trace has in common with its views."""
    return int(tensor.untyped_storage()._cdata)


def _value(tensor: Tensor) -> Tensor:
    """The value that a tensor of the trace has now: another one after each change. A constant is its own value."""
    if not torch._is_functional_tensor(tensor):
        return tensor
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
