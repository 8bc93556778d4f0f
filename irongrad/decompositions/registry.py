"""Where decompositions are registered: an operator, and the function of simpler operators that stands for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch._decomp import get_decompositions

Operator: TypeAlias = torch._ops.OperatorBase
Decomposition: TypeAlias = Callable[..., object]
F = TypeVar("F", bound=Decomposition)

_REGISTERED: dict[Operator, Decomposition] = {}
_PYTORCH: list[Operator | torch._ops.OpOverloadPacket] = []
_KEPT: set[Operator] = set()


def decomposes(*operators: Operator) -> Callable[[F], F]:
    """Register a function as the decomposition of `operators`, over whatever PyTorch and torch-mlir have for them.

    It takes their arguments and returns their results, as a composition of other operators, functional and without
    control flow on values. It may return NotImplemented for arguments that are to stay as they are.

    Raises:
        ValueError: one of them has a decomposition here already; each belongs to one family.
    """

    def register(function: F) -> F:
        for operator in operators:
            if operator in _REGISTERED:
                raise ValueError(f"{operator} has a decomposition already: {_REGISTERED[operator].__module__}")
            _REGISTERED[operator] = function
        return function

    return register


def uses_pytorch(*operators: Operator | torch._ops.OpOverloadPacket) -> None:
    """Use PyTorch's own decomposition of `operators`.

    One by one: all that PyTorch has would expand operators to primitives that torch-mlir lacks.
    """
    _PYTORCH.extend(operators)


def keeps(*operators: Operator) -> None:
    """Have `operators` left as they are, although PyTorch or torch-mlir would decompose them."""
    _KEPT.update(operators)


def merged(table: dict[Operator, Decomposition]) -> dict[Operator, Decomposition]:
    """`table` with what is registered here over it."""
    both = {**table, **get_decompositions(_PYTORCH)}
    return {op: f for op, f in both.items() if op not in _KEPT} | _REGISTERED
