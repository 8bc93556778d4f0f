"""Replacements for functions whose eager kernels refuse float64, for the float64 oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def eager_float64() -> Iterator[None]:
    """While open, the functions in `_FORMS` accept float64."""
    with _Float64():
        yield


class _Float64(TorchFunctionMode):
    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ):
        form = _FORMS.get(func)
        if form is not None and args[0].dtype is torch.float64:
            return form(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped_mm(x: Tensor, y: Tensor, *, offs: Tensor | None = None, **kwargs: object) -> Tensor:
    """A matrix product for each group, from operators that autograd differentiates."""
    if offs is None:
        return torch.bmm(x, y)
    parts = [slice(start, end) for start, end in itertools.pairwise([0, *offs.tolist()])]
    if x.ndim == y.ndim:
        return torch.stack([x[:, p] @ y[p] for p in parts])
    if x.ndim == 3:
        return torch.cat([x[g] @ y[:, p] for g, p in enumerate(parts)], 1)
    rest = x.new_zeros(x.shape[0] - parts[-1].stop, y.shape[2])
    return torch.cat([*(x[p] @ y[g] for g, p in enumerate(parts)), rest])


_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
}
