"""How the tensors of a trace are computed: two that are computed alike from the same tensors are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

# Functions of each element whose operators have other names, or no tag.
_OF_EACH_ELEMENT = frozenset({"clone", "detach", "to", "type", "float", "double", "half", "long", "int", "bool"})
_VIEWS = frozenset(
    {"expand", "flatten", "getitem", "permute", "reshape", "select", "squeeze", "transpose", "unsqueeze"}
)
_VIEWS |= {"contiguous", "view"}
# The names of Python's operators, where they differ from those of PyTorch's.
_SPELLED = {"truediv": "div", "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_SPELLED |= {f"{side}{n}": _SPELLED.get(n, n) for n in ("add", "sub", "mul", "pow", "truediv") for side in "ri"}


@dataclass(frozen=True)
class _Origin:
    """The call that computed a tensor, with its arguments as they were then."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    structure: object

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Origin:
        """The origin of what a call returns."""
        leaves, structure = tree_flatten((args, kwargs))
        return cls(function, tuple((leaf, version_of(leaf)) for leaf in leaves), structure)


class Origins:
    """The calls that computed the tensors of one trace."""

    def __init__(self) -> None:
        self._origins = WeakTensorKeyDictionary()

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note a call, if equal arguments give equal results."""
        if isinstance(result, Tensor) and (is_of_each_element(function) or _name_of(function) in _VIEWS):
            self._origins[result] = _Origin.of(function, args, kwargs)

    def are_equal(self, one: Any, other: Any) -> bool:
        """Whether two values are known to be equal; tensors have the values that they have now."""
        if one is other:
            return True
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return type(one) is type(other) and bool(one == other)
        if _are_one_memory(one, other):
            return True
        first, second = self._origins.get(one), self._origins.get(other)
        if first is None or second is None or version_of(one) or version_of(other):
            return False
        if first.function is not second.function or first.structure != second.structure:
            return False
        return all(
            version_of(a) == at_a and version_of(b) == at_b and self.are_equal(a, b)
            for (a, at_a), (b, at_b) in zip(first.args, second.args, strict=True)
        )


def version_of(value: object) -> int | None:
    """How often a tensor was written; None for anything else."""
    return value._version if isinstance(value, Tensor) else None


def is_of_each_element(function: Callable[..., Any]) -> bool:
    """Whether a function of PyTorch computes each element by itself, as the tag of its operator says."""
    name = _name_of(function)
    return name in _OF_EACH_ELEMENT or any(map(_is_pointwise, (name, _SPELLED.get(name, name))))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "").strip("_")


def _is_pointwise(name: str) -> bool:
    packet = getattr(aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def _are_one_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a trace are the same elements of one memory, such as `x[:, None]` and `x[:, None]`."""
    if not (isinstance(one, FakeTensor) and isinstance(other, FakeTensor)):
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    views = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (one, other)]
    return views[0] == views[1]
