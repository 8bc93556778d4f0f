"""Tensors that have only a shape and a dtype, and the results of operators on them, without a fake tensor mode.

The results come from meta kernels. A fake tensor's dispatch ends in the same kernels, and takes twenty times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

CPU = torch.device("cpu")
_META = torch.device("meta")


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor without storage."""
    return torch.empty(shape, dtype=dtype, device=_META)


def result_of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of `operator` on tensors without storage; its results have no storage either.

    Results of elementwise operators are cached by the kinds of their arguments. Their meta kernels are written in
    Python, and passes call the same few of them again and again.

    Raises:
        NotImplementedError: PyTorch has no meta kernel for the operator.
    """
    if not _is_elementwise(operator):
        return operator(*args, **{**kwargs, **({"device": _META} if _takes_device(operator) else {})})
    return _elementwise(operator, _kinds(args), tuple(kwargs), _kinds(kwargs.values())).empty()


class _Kind(NamedTuple):
    """Everything that is known of a tensor without storage.

    Attributes:
        shape: the sizes.
        stride: the strides, as in `torch.Tensor.stride`; results may take them over.
        dtype: the dtype of the elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kind:
        """Return the kind of `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self) -> torch.Tensor:
        """Return a tensor of this kind."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


def _kinds(values: Iterable[Any]) -> tuple[_Kind | tuple[type, Any], ...]:
    """The kinds of tensors; other values with their types, because 1, 1.0 and True are equal in Python."""
    return tuple(_Kind.of(v) if isinstance(v, torch.Tensor) else (type(v), v) for v in values)


@lru_cache(maxsize=4096)
def _elementwise(operator: OpOverload, args: tuple[Any, ...], names: tuple[str, ...], named: tuple[Any, ...]) -> _Kind:
    values = [v.empty() if isinstance(v, _Kind) else v[1] for v in (*args, *named)]
    return _Kind.of(operator(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True))))


@cache
def _is_elementwise(operator: OpOverload) -> bool:
    """Whether the operator computes one new tensor, element by element, from tensors and numbers."""
    schema = operator._schema
    return (
        torch.Tag.pointwise in operator.tags
        and not schema.is_mutable
        and not _takes_device(operator)
        and [str(r.type) for r in schema.returns] == ["Tensor"]
        and not any("[]" in str(a.type) for a in schema.arguments)
    )


@cache
def _takes_device(operator: OpOverload) -> bool:
    return any(argument.name == "device" for argument in operator._schema.arguments)


def faked(result: Any, mode: FakeTensorMode) -> Any:
    """Return `result` as values in a graph are: each tensor a fake one of `mode`, on the CPU."""
    if isinstance(result, torch.Tensor):  # the common case
        return FakeTensor(mode, result, CPU)
    return tree_map_only(torch.Tensor, lambda tensor: FakeTensor(mode, tensor, CPU), result)
