"""Runs a graph with symbolic sizes at a bucket's sizes, exactly: true elements never depend on padding.

The graph was captured with its named dimensions as symbols, so every size in it is an expression of them. An argument
that an operator's schema declares as a size gets the bucket's value. A number that is computed from sizes, such as the
divisor of a mean, gets the true value, as a tensor. If an operator would read padding, its rule runs it and masks the
padding.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import Target
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from irongrad.diagnostics.source_lines import line_of
from irongrad.operators.legalize.retrace import Portable
from irongrad.operators.random import is_random
from irongrad.padding.layout import Layout, is_padded, layout_of, same_sizes, size_of
from irongrad.padding.padded import Padded, Padding
from irongrad.padding.registry import Call, NoRule, rule_of
from irongrad.padding.rules import load_rules
from irongrad.padding.rules.pointwise import is_pointwise, pointwise
from irongrad.padding.rules.random import random
from irongrad.runtime.errors import InternalError, UnsupportedOpError
from irongrad.sizes.asked import Asked, listed
from irongrad.sizes.open import is_padded_size

_SIZE_TYPES = ("int", "SymInt", "List[int]", "Optional[int]", "Optional[List[int]]")
# These assert conditions on sizes. The guards of the entry points check the same conditions.
_ASSERTIONS = frozenset(
    {
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
    }
)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ZEROED = "irongrad.zeroed"  # the key in a graph's `meta` under which `zeroed_in` stores its result


class PaddedInterpreter(Portable):
    """Runs a graph on tensors with a bucket's sizes.

    Args:
        graph: the graph, with symbolic sizes in its nodes' `meta`.
        names: each symbol of the graph as an expression of named dimensions.
        padding: the sizes of the bucket and of the call.
        zeroed: the node results whose padding is set to zero where they are computed.
        asked: the conditions on the sizes of open dimensions that the trace asks; None if no dimension is open.
    """

    def __init__(
        self,
        graph: GraphModule,
        names: Mapping[sympy.Symbol, sympy.Expr],
        padding: Padding,
        zeroed: Collection[Hashable] = (),
        asked: Asked | None = None,
    ) -> None:
        super().__init__(graph)
        load_rules()
        self._names = names
        self._padding = padding
        self._zeroed = zeroed
        self._asked = asked

    def placeholder(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An argument, with the padding that follows from its symbolic sizes."""
        value = super().placeholder(target, args, kwargs)
        expected = self._sizes(self.node.meta["val"])
        return self._finished(self._given(value, layout_of(expected)), 0) if expected is not None else value

    def output(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results, with the true elements first in every dimension."""
        return super().output(target, tree_map(self._compact, args), kwargs)

    def run_node(self, n: Node) -> Any:
        """Run one node; a node that computes a size gives a number or an expression of named dimensions.

        Raises:
            UnsupportedOpError: the node's form depends on the size of an open dimension; names the user's line.
        """
        value = n.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            return self._named(value)
        result = super().run_node(n)
        if self._asked is not None and (new := self._asked.new()):
            raise UnsupportedOpError(_depends_on_size(n, new))
        return result

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, by its padding rule if padding is involved."""
        if target is operator.getitem:
            return args[0][args[1]]
        if target in _ASSERTIONS:
            return None
        if not self._concerns_padding((args, kwargs)):
            results = super().call_function(target, *tree_map(self._opened, (args, kwargs), is_leaf=_is_leaf))
            return self._with_layouts(results)
        try:
            results = self._by_rule(target, args, kwargs)
        except NoRule as reason:
            raise UnsupportedOpError(self._refusal(target, (args, kwargs), str(reason))) from None
        self._check(results)
        if isinstance(results, list | tuple):
            return [self._finished(r, i) for i, r in enumerate(results)]
        return self._finished(results, 0)

    def _given(self, value: Tensor, layout: Layout) -> Padded:
        """Wrap an argument; its padding is zero, because entry points pad with zeros."""
        return Padded(value, layout, zero=True)

    def _finished(self, result: Padded | None, number: int) -> Padded | Tensor | None:
        """Result `number` of a node in the form that its users receive; a tensor of fixed sizes is not wrapped.

        The result is cast to its dtype in the graph. A size is a Python number in the program and promotes no dtype.
        Here it is a tensor, which may promote.
        """
        if result is None:
            return None
        result = replace(result, tensor=result.tensor.to(tree_leaves(self.node.meta["val"])[number].dtype))
        if not result.padded():
            return result if any(a.size.free_symbols for dim in result.layout for a in dim) else result.tensor
        made = replace(result, maker=result.maker or (self.node.name, number))
        if made.maker not in self._zeroed or made.repeats_padding():
            return made
        return replace(made, tensor=self._padding.fill(made, 0), zero=True)

    def _by_rule(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, OpOverload):
            what = "control flow" if isinstance(target, HigherOrderOperator) else "not an operator"
            raise NoRule(f"is {what} and has no padding rule")
        arguments = _bound(target, args, kwargs)
        call = Call(
            target, tree_map(_wrapped, arguments, is_leaf=_is_leaf), self._padding, self._result_sizes(), self._run
        )
        if (rule := rule_of(target)) is not None:
            return rule(call)
        if is_random(target):
            return random(call)
        if is_pointwise(target):
            return pointwise(call)
        raise NoRule("has no padding rule")

    def _run(self, target: OpOverload, arguments: dict[str, Any]) -> Any:
        """Run `target` on the bucket's tensors and sizes."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for schema in target._schema.arguments:
            is_size = str(schema.type) in _SIZE_TYPES
            value = tree_map(lambda v, s=is_size: self._bucketed(v, s), arguments[schema.name], is_leaf=_is_leaf)
            if schema.kwarg_only:
                kwargs[schema.name] = value
            else:
                args.append(value)
        return super().call_function(target, tuple(args), kwargs)

    def _bucketed(self, value: Any, is_size: bool) -> Any:
        if isinstance(value, Padded):
            return value.tensor
        if isinstance(value, sympy.Basic):
            if not is_size and is_padded_size(value):
                raise NoRule("takes a number computed from sizes, for which it has no padding rule")
            return self._padding.sizes.bucket(value) if is_size else self._opened(value)
        return value

    def _opened(self, value: Any) -> Any:
        """A value that depends on open dimensions alone, as an operator takes it; other values stay as they are."""
        if isinstance(value, Padded):
            return value.tensor
        return self._padding.sizes.open(value) if isinstance(value, sympy.Basic) else value

    def _with_layouts(self, results: Any) -> Any:
        """The results of an operator without padding; those whose sizes depend on open dimensions are wrapped."""
        sizes = self._result_sizes()
        if not any(isinstance(d, sympy.Basic) for expected in sizes for d in expected or ()):
            return results
        if isinstance(results, list | tuple):
            return [_sized(r, expected) for r, expected in zip(results, sizes, strict=True)]
        return _sized(results, sizes[0])

    def _concerns_padding(self, arguments: Any) -> bool:
        expected = [d for sizes in self._result_sizes() if sizes is not None for d in sizes]
        return tree_any(_is_concerned, arguments, is_leaf=_is_leaf) or any(map(_is_concerned, expected))

    def _result_sizes(self) -> list[tuple[Any, ...] | None]:
        return [self._sizes(v) for v in tree_leaves(self.node.meta.get("val"))]

    def _sizes(self, value: Any) -> tuple[Any, ...] | None:
        return tuple(self._named(s) for s in value.shape) if isinstance(value, torch.Tensor) else None

    def _named(self, value: Any) -> Any:
        """Turn a symbolic number into a number or an expression of named dimensions; other values stay as they are."""
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = sympy.sympify(value.node.expr).xreplace(dict(self._names))
        if expression.free_symbols:
            return expression
        return int(expression) if isinstance(value, torch.SymInt) else float(expression)

    def _compact(self, value: Any) -> Any:
        if not isinstance(value, Padded):
            return value
        for d, dim in enumerate(value.layout):
            if len(dim) > 1:
                moved = self._padding.take(value, d, torch.arange(self._padding.extent(dim)))
                value = Padded(moved, (*value.layout[:d], *layout_of([size_of(dim)]), *value.layout[d + 1 :]))
        return value.tensor

    def _check(self, results: Any) -> None:
        """Check that the results have the sizes that the graph states; if not, the rule is wrong."""
        result_list = results if isinstance(results, list | tuple) else [results]
        self._padding.needs |= {
            s - 1 for expected in self._result_sizes() for s in expected or () if isinstance(s, sympy.Basic)
        }
        for result, expected in zip(result_list, self._result_sizes(), strict=True):
            if result is None or expected is None:
                continue
            sizes = tuple(size_of(dim) for dim in result.layout)
            if not same_sizes(sizes, expected) or tuple(result.tensor.shape) != tuple(
                self._padding.sizes.bucket(s) for s in expected
            ):
                raise InternalError(
                    f"{line_of(self.node)}: the padding rule of {self.node.target} returns sizes {sizes} as "
                    f"{tuple(result.tensor.shape)}, but the graph has {expected}"
                )

    def _refusal(self, target: Target, arguments: Any, reason: str) -> str:
        leaves = tree_leaves(arguments, is_leaf=_is_leaf)
        sizes = [size_of(d) for v in leaves if isinstance(v, Padded) for d in v.layout if is_padded(d)]
        sizes += [v for v in leaves if isinstance(v, sympy.Basic)]
        expected = [d for m in self._result_sizes() if m is not None for d in m if isinstance(d, sympy.Basic)]
        names = _padded_names(sizes) or _padded_names(expected)
        shapes = ", ".join(
            "(" + ", ".join(str(size_of(d)) for d in v.layout) + ")" for v in leaves if isinstance(v, Padded)
        )
        listed = ", ".join(repr(n) for n in names)
        return (
            f"{line_of(self.node)}\n  {target}, on sizes {shapes or tuple(expected)}, {reason}. It cannot be padded "
            f"exactly along {listed}: leave {listed} out of dynamic= and buckets=, so that its size is fixed, or "
            "register a rule for the operator with irongrad.register_padding_rule"
        )


def _bound(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = target._schema.arguments
    values = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    return values | {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Padded | sympy.Basic)


def _wrapped(value: Any) -> Any:
    return Padded(value, layout_of(value.shape)) if isinstance(value, torch.Tensor) else value


def _sized(value: Any, sizes: Sequence[Any] | None) -> Any:
    """Wrap a tensor of these sizes if they depend on named dimensions."""
    if not isinstance(value, torch.Tensor) or not any(isinstance(size, sympy.Basic) for size in sizes or ()):
        return value
    return Padded(value, layout_of(sizes or ()))


def _padded_names(sizes: Sequence[sympy.Expr]) -> list[str]:
    return sorted({s.name for size in sizes for s in size.free_symbols if is_padded_size(s)})


def _is_concerned(value: Any) -> bool:
    """Whether a value has padding, or is a size or a number that depends on padding."""
    return (
        bool(value.padded()) if isinstance(value, Padded) else isinstance(value, sympy.Basic) and is_padded_size(value)
    )


def _depends_on_size(node: Node, asked: Sequence[Any]) -> str:
    names = ", ".join(sorted({repr(s.name) for condition in asked for s in condition.free_symbols}))
    return (
        f"{line_of(node)}\n  {node.target} is compiled differently where {listed(asked)} does not hold, so it cannot "
        f"be compiled for every size of {names}: give {names} sizes in buckets= too, or leave {names} out of dynamic=, "
        "so that its size is fixed"
    )


def interpret_padded(
    graph: GraphModule,
    values: Sequence[torch.Tensor],
    names: Mapping[sympy.Symbol, sympy.Expr],
    padding: Padding,
    zeroed: Collection[Hashable] = (),
    asked: Asked | None = None,
) -> Sequence[torch.Tensor]:
    """Run `graph` on flat `values` at a bucket's sizes and return its flat outputs, padded at the end.

    Args:
        graph: the graph, with symbolic sizes in its nodes' `meta`.
        values: its flat arguments, at the bucket's sizes.
        names: each symbol of the graph as an expression of named dimensions.
        padding: the sizes of the bucket and of the call.
        zeroed: the result of `zeroed_in`.
        asked: the conditions on the sizes of open dimensions that the trace asks.

    Raises:
        UnsupportedOpError: an operator would read padding and has no rule, or its form depends on the size of an open
            dimension; the message has the user's line.
    """
    interpreter = PaddedInterpreter(graph, names, padding, zeroed, asked)
    outputs: Sequence[torch.Tensor] = interpreter.run(*values, enable_io_processing=False)
    return outputs


def zeroed_in(
    graph: GraphModule,
    values: Sequence[torch.Tensor],
    names: Mapping[sympy.Symbol, sympy.Expr],
    padding: Padding,
    asked: Asked | None = None,
) -> Collection[Hashable]:
    """The node results that some node of `graph` reads with zeros in place of padding.

    The interpreter writes the zeros where the result is computed, so the mask fuses into the kernel that computes it. A
    mask for one of several readers would copy the result. The other readers accept any values in padding. The results
    are the same in every bucket, so they are computed once and stored in the `meta` of `graph`.

    Args:
        graph: the graph, with symbolic sizes in its nodes' `meta`.
        values: its flat arguments, at the bucket's sizes.
        names: each symbol of the graph as an expression of named dimensions.
        padding: the sizes of the bucket and of the call; its `zeroed` is filled in.
        asked: as in `interpret_padded`.
    """
    if _ZEROED not in graph.meta:
        mode = detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)
        with _disable_current_modes(), mode, torch.no_grad():
            like = [torch.empty(v.shape, dtype=v.dtype) for v in values]
            PaddedInterpreter(graph, names, padding, asked=asked).run(*like, enable_io_processing=False)
        graph.meta[_ZEROED] = padding.zeroed
    found: Collection[Hashable] = graph.meta[_ZEROED]
    return found
