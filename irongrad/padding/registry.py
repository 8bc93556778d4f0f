"""The registry of padding rules, which say how each operator handles padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from irongrad.padding.layout import Layout, broadcast, is_uniform, size_of, solid, unified
from irongrad.padding.padded import Padded, Padding

aten = torch.ops.aten


class NoRule(Exception):  # noqa: N818 (the interpreter turns it into an error)
    """An operator cannot run on these padded arguments; the message gives the reason, to follow the operator's name."""


class Call:
    """One call of an operator on padded arguments.

    Attributes:
        operator: the operator.
        arguments: the arguments by their names in the operator's schema, including defaults. Tensors are `Padded`;
            sizes are numbers or expressions of named dimensions.
        padding: the padding of this run.
        made: the sizes of each result in the graph, as numbers or expressions; None for a result that is no tensor.
    """

    def __init__(
        self,
        operator: OpOverload,
        arguments: dict[str, Any],
        padding: Padding,
        made: Sequence[tuple[Any, ...] | None],
        run: Callable[[OpOverload, dict[str, Any]], Any],
    ) -> None:
        self.operator = operator
        self.arguments = arguments
        self.padding = padding
        self.made = made
        self._run = run

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def run(self, /, **replaced: Any) -> Any:
        """Run the operator on the bucket's tensors, with some arguments replaced."""
        return self._run(self.operator, {**self.arguments, **replaced})

    def zeros(self, *names: str) -> dict[str, Any]:
        """The arguments called `names`, with zeros for their padding; an argument that is None stays None."""
        return {n: None if self[n] is None else self.padding.fill(self[n], 0) for n in names}

    def aligned(self, *names: str) -> None:
        """Give the tensors called `names` the same padding in each dimension in which they broadcast together."""
        values = [self[n] for n in names]
        if broadcast([v.layout for v in values]) is not None:
            return
        rank = max(v.ndim for v in values)
        for d in range(-rank, 0):
            dims = [v.layout[d] for v in values if v.ndim >= -d and not is_uniform(v.layout[d])]
            target = next((solid(dim) for dim in dims if size_of(dim) != 1), None)
            for name in names:
                value = self[name]
                if target is not None and value.ndim >= -d and unified(target, value.layout[d]) is None:
                    self.arguments[name] = self.padding.aligned(value, value.ndim + d, target)

    def like(self, name: str, layout: Layout) -> Padded:
        """Move the true elements of the argument called `name` to where `layout` has them, and return the argument."""
        value: Padded = self[name]
        for d, (dim, wanted) in enumerate(zip(value.layout, layout, strict=True)):
            if size_of(dim) == 1:
                continue
            if unified(wanted, dim) is None:
                value = self.padding.aligned(value, d, solid(wanted))
            else:
                value = value.named((*value.layout[:d], solid(wanted), *value.layout[d + 1 :]))
        self.arguments[name] = value
        return value

    def broadcast(self, *values: Padded | None) -> Layout:
        """The layout that results from broadcasting `values`.

        Raises:
            NoRule: the padding of the values differs.
        """
        return self.broadcast_layouts([v.layout for v in values if v is not None])

    def broadcast_layouts(self, layouts: Sequence[Layout]) -> Layout:
        """As `broadcast`, for tensors of these layouts."""
        layout = broadcast(layouts)
        if layout is None:
            raise NoRule("combines tensors whose padding lies in different places")
        return layout


Rule = Callable[[Call], Any]
R = TypeVar("R", bound=Rule)

RULES: dict[OpOverload, Rule] = {}
_USER: dict[OpOverload, Rule] = {}


def rule(*operators: OpOverload) -> Callable[[R], R]:
    """Register a padding rule for these operators; it returns a `Padded` or None for each result."""

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


def register_padding_rule(operator: OpOverload) -> Callable[[R], R]:
    """Register how an operator handles padding, so that a step with buckets may use it on padded dimensions.

    The rule receives a `Call` and returns a `Padded` for each result. `call["name"]` is the argument with that name in
    the operator's schema. A tensor argument is a `Padded`, whose `layout` describes each dimension.
    `call.run(name=tensor)` runs the operator on the bucket's tensors, with the named ones replaced.
    `call.padding.fill(value, 0)` is a tensor with zeros for its padding. If all padding of a result is known to be
    zero, return `Padded(…, zero=True)`, which saves a mask. A rule for an operator that sums over all dimensions but
    the first::

        @irongrad.register_padding_rule(torch.ops.mylib.row_sums.default)
        def rule(call):
            x = call["x"]
            return Padded(call.run(x=call.padding.fill(x, 0)), x.layout[:1])

    A later registration replaces an earlier one. It also replaces a rule of IronGrad's own.
    """

    def register(function: R) -> R:
        _USER[operator] = function
        return function

    return register


def has_users_rules() -> bool:
    """Whether a user registered any rule."""
    return bool(_USER)


def rule_of(operator: OpOverload) -> Rule | None:
    """The rule of an operator, a user's rule first; None if the operator has no rule of its own."""
    return _USER.get(operator) or RULES.get(operator)
