"""The registry of decompositions: for each operator, a function of simpler operators that replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from irongrad.graph.recorder import Decomposition, Operator
from irongrad.runtime.errors import UserError

LIBRARY = "irongrad_functions"


F = TypeVar("F", bound=Decomposition)

_REGISTERED: dict[Operator, Decomposition] = {}
_NAMED: dict[str, Decomposition] = {}
_USER: dict[Operator, Decomposition] = {}
_PYTORCH: list[Operator | torch._ops.OpOverloadPacket] = []
_KEPT: set[Operator] = set()


def decomposes(*operators: Operator) -> Callable[[F], F]:
    """Register a function as the decomposition of `operators`, in place of PyTorch's and torch-mlir's.

    The function takes an operator's arguments and returns its results. It composes other operators, is functional and
    has no control flow on values. For arguments with which the operator should stay as it is, it returns
    NotImplemented.

    Raises:
        ValueError: one of `operators` has a decomposition here already. Each operator belongs to one family.
    """

    def register(function: F) -> F:
        for operator in operators:
            if operator in _REGISTERED:
                raise ValueError(f"{operator} has a decomposition already: {_REGISTERED[operator].__module__}")
            _REGISTERED[operator] = function
        return function

    return register


def decomposes_named(name: str) -> Callable[[F], F]:
    """Register a decomposition as `decomposes` does, for an operator that exists once its library is imported.

    Args:
        name: the operator's `library::name`, as in `torch.library.custom_op`.
    """

    def register(function: F) -> F:
        _NAMED[name] = function
        return function

    return register


def uses_pytorch(*operators: Operator | torch._ops.OpOverloadPacket) -> None:
    """Use PyTorch's own decomposition of `operators`.

    Operators are listed one by one: PyTorch's full table would expand operators to primitives that torch-mlir lacks.
    """
    _PYTORCH.extend(operators)


def keeps(*operators: Operator) -> None:
    """Leave `operators` as they are, although PyTorch or torch-mlir would decompose them."""
    _KEPT.update(operators)


def register_decomposition(operator: object) -> Callable[[F], F]:
    """Register a function that replaces a custom operator wherever a step or a function is compiled.

    The function takes the operator's arguments and computes its results with other operators. Gradients go through the
    function, unless the operator has an autograd formula of its own. Eager PyTorch still runs the operator itself; so
    does the oracle that compiled code is compared with. A later registration replaces an earlier one.

    Args:
        operator: `torch.ops.library.name`, one overload of it, or the result of `torch.library.custom_op`.

    Returns:
        A decorator, which can also be called: `irongrad.register_decomposition(operator)(function)`.

    Raises:
        UserError: `operator` is no operator, or IronGrad has a decomposition of it.
    """
    overloads = _overloads(operator)
    for overload in overloads:
        if overload in _REGISTERED:
            raise UserError(f"{overload} has a decomposition in {_REGISTERED[overload].__module__} already")

    def register(function: F) -> F:
        _USER.update(dict.fromkeys(overloads, function))
        return function

    return register


def _overloads(operator: object) -> list[torch._ops.OpOverload]:
    if isinstance(operator, CustomOpDef):
        return [operator._opoverload]
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    raise UserError(
        f"{operator!r} is no operator; give torch.ops.library.name, or what torch.library.custom_op returned"
    )


def has_formula(operator: torch._ops.OpOverload) -> bool:
    """Return whether `operator` has an autograd formula of its own."""
    definition = OPDEFS.get(operator._schema.name)
    if definition is not None:
        return definition._backward_fn is not None
    return any(operator.has_kernel_for_dispatch_key(key) for key in (DispatchKey.Autograd, DispatchKey.AutogradCPU))


class BeforeAutograd(TorchFunctionMode):
    """While open, replaces user operators without an autograd formula by their decompositions, which have gradients.

    Args:
        eager: for eager runs, replace an operator only where autograd records it. Otherwise the operator itself
            computes the expected values.
    """

    def __init__(self, *, eager: bool = False) -> None:
        super().__init__()
        self._eager = eager

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        called = func
        if isinstance(func, torch._ops.OpOverloadPacket) and len(func.overloads()) == 1:
            called = getattr(func, func.overloads()[0])
        replaced = called in _USER and not has_formula(called)
        if replaced and (not self._eager or _is_recorded(args, kwargs)):
            with self:  # the decomposition may call other user operators
                return _USER[called](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_recorded(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether autograd records an operator with these arguments."""
    tensors = (a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def family_of(operator: Operator) -> str | None:
    """Return the family that decomposes `operator`: one of IronGrad's, or `user`; None if IronGrad has none for it."""
    if operator in _USER:
        return "user"
    function = _REGISTERED.get(operator) or _NAMED.get(operator.name())
    return function.__module__.rpartition(".")[2] if function is not None else None


def users_operators() -> frozenset[Operator]:
    """Return the operators for which users registered a decomposition."""
    return frozenset(_USER)


def with_users(table: dict[Operator, Decomposition]) -> dict[Operator, Decomposition]:
    """Return `table` with the decompositions of loaded operators of other libraries, and with the users' over it."""
    named = {OPDEFS[name]._opoverload: function for name, function in _NAMED.items() if name in OPDEFS}
    return {**table, **named, **_USER}


def merged(table: dict[Operator, Decomposition]) -> dict[Operator, Decomposition]:
    """Return `table` with the decompositions registered here over it."""
    both = {**table, **get_decompositions(_PYTORCH)}
    return {op: f for op, f in both.items() if op not in _KEPT} | _REGISTERED
