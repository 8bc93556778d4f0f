"""Tensors that are a shape and a dtype alone, and what operators give for them: by meta kernels, without a fake mode.

A fake tensor's dispatch ends in the same kernels, and takes twenty times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

CPU = torch.device("cpu")
_META = torch.device("meta")


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor without storage."""
    return torch.empty(shape, dtype=dtype, device=_META)


def result_of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `operator` gives for tensors without storage; what it makes of no tensor has none either.

    Raises:
        NotImplementedError: PyTorch has no meta kernel for it.
    """
    return operator(*args, **{**kwargs, **({"device": _META} if _takes_device(operator) else {})})


@cache
def _takes_device(operator: OpOverload) -> bool:
    return any(argument.name == "device" for argument in operator._schema.arguments)


def faked(result: Any, mode: FakeTensorMode) -> Any:
    """`result` as values of a graph have it: each tensor a fake one of `mode`, on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: FakeTensor(mode, tensor, CPU), result)
