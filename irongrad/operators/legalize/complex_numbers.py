"""Remove complex values from a graph: each becomes its real and its imaginary part.

torch-mlir 20261001 has no lowering for most complex operators, and IREE 3.13.0 has no complex matrix product. So no
graph after this stage has complex values. `irongrad.operators.decompositions.pairs` holds the operators on pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.node import Target
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from irongrad.diagnostics import source_lines
from irongrad.diagnostics.advice import known
from irongrad.diagnostics.refusals import Refusal, gathers, refuse
from irongrad.graph.recorder import Decomposition, Operator
from irongrad.operators.decompositions.pairs import Pair, pair_rules
from irongrad.operators.decompositions.pairs.pair import real_dtype
from irongrad.operators.legalize.retrace import Portable, interpret_eager, traced
from irongrad.runtime.errors import CaptureError, UnsupportedOpError

aten = torch.ops.aten

_AS_REAL = "Pass torch.view_as_real(z), and call torch.view_as_complex inside"


def refuse_complex(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse complex inputs, parameters and buffers.

    Args:
        tensors: the tensors to check, by the name that the message uses.

    Raises:
        CaptureError: a tensor is complex. The message names the first one and advises what to do instead.
    """
    for name, tensor in tensors.items():
        if tensor.is_complex() and not gathers():  # while refusals are gathered, `legality` reports all complex tensors
            raise CaptureError(f"{name!r} is a complex tensor, which no artifact can hold. {_AS_REAL}")


def has_complex(graph: GraphModule) -> bool:
    """Return whether any value in `graph` is complex."""
    return any(_is_complex(n.meta.get("val")) for n in graph.graph.nodes)


def in_reals(graph: GraphModule) -> GraphModule:
    """Return the same function without complex values inside; `graph` itself if it has none.

    Args:
        graph: a graph of ATen operators with real arguments. `meta["val"]` of each node holds a fake result.

    Raises:
        CaptureError: a result is complex.
        UnsupportedOpError: an operator has no rule for complex numbers. The message has the user's line.
    """
    if not has_complex(graph):
        return graph
    for result in graph.graph.output_node().all_input_nodes:
        if _is_complex(result.meta["val"]):
            line = source_lines.line_of(result)
            if not gathers():
                raise CaptureError(f"{line}\n  a result is complex. Return torch.view_as_real(z)")
            refuse([Refusal("", line, "a result is complex", "Return torch.view_as_real(z)")])
    examples = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    # In-place operators are removed first: a pair has no storage that views of it could share.
    functional = traced(functionalize(lambda *v: list(interpret_eager(graph, v))), examples, _expansions())
    _without_interleaving(functional)

    def run(*values: torch.Tensor) -> list[Any]:
        results = _InPairs(functional).run(*values, enable_io_processing=False)
        return [r.re if isinstance(r, Pair) else r for r in results]  # a complex result is refused above

    return traced(run, examples, {})


def at_fixed_sizes(graph: GraphModule, symbols: Collection[Any]) -> GraphModule:
    """Return `in_reals(graph)`, which needs fixed sizes.

    Args:
        graph: as in `in_reals`.
        symbols: the symbols of the graph's dynamic dimensions; empty if all sizes are fixed.

    Raises:
        UnsupportedOpError: the graph has dynamic dimensions and complex values.
    """
    if symbols and has_complex(graph):
        raise UnsupportedOpError("a step with dynamic dimensions cannot have complex values inside; leave out dynamic")
    return in_reals(graph)


def _is_complex(value: Any) -> bool:
    """Whether the tree `value` contains a complex tensor, a complex number or a pair."""
    dtypes = [v.dtype for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
    return any(d.is_complex for d in dtypes) or any(isinstance(v, complex | Pair) for v in tree_leaves(value))


def _expansions() -> dict[Operator, Decomposition]:
    """PyTorch's decompositions of operators without a rule for pairs, applied to complex arguments only."""

    def if_complex(function: Callable[..., Any]) -> Decomposition:
        return lambda *a, **k: function(*a, **k) if _is_complex((a, k)) else NotImplemented

    known = torch._decomp.decomposition_table
    return {op: if_complex(f) for op, f in known.items() if op not in pair_rules()}


def _without_interleaving(graph: GraphModule) -> None:
    """Replace view_as_real(z)[..., i] by the real or imaginary part of z, and rewrite its backward likewise.

    The backward builds a complex gradient from the gradient of one part and zeros.
    """
    for node in graph.graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.target is aten.select.int and source.target is aten.view_as_real.default and _is_last(node):
            node.target = (aten.real.default, aten.imag.default)[node.args[2]]
            node.args = source.args
        if node.target is aten.view_as_complex.default and source.target is aten.select_backward.default:
            gradient, sizes, dim, index = source.args
            if dim % len(sizes) == len(sizes) - 1:
                with graph.graph.inserting_before(node):
                    zeros = graph.graph.call_function(aten.zeros_like.default, (gradient,))
                node.target = aten.complex.default
                node.args = (zeros, gradient) if index else (gradient, zeros)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_last(select: Node) -> bool:
    """Whether a select indexes the last dimension."""
    source, dim, _ = select.args
    ndim = source.meta["val"].ndim
    return bool(dim % ndim == ndim - 1)


class _InPairs(Portable):
    """Interpreter of a functional graph that represents each complex value by a pair."""

    def placeholder(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split a complex argument into its parts; the argument is refused elsewhere."""
        value = super().placeholder(target, args, kwargs)
        return Pair(*torch.view_as_real(value).unbind(-1)) if _is_complex(value) else value

    def stand_in(self, value: Any) -> Any:
        """Return a stand-in as `Portable` does, with a pair for a complex tensor."""
        example = super().stand_in(value)
        if isinstance(example, torch.Tensor) and example.is_complex():
            return Pair(*(torch.empty(example.shape, dtype=real_dtype(example.dtype)) for _ in range(2)))
        return example

    def get_attr(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split a complex constant into its parts."""
        value = super().get_attr(target, args, kwargs)
        if not _is_complex(value):
            return value
        with _disable_current_modes():
            return Pair(*(part.contiguous() for part in torch.view_as_real(value.resolve_conj()).unbind(-1)))

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, on pairs if it takes or returns complex values."""
        example = self.node.meta.get("val")
        if not isinstance(target, torch._ops.OpOverload) or not _is_complex((args, kwargs, example)):
            return super().call_function(target, args, kwargs)
        if target not in pair_rules():
            raise UnsupportedOpError(
                f"{source_lines.line_of(self.node)}\n  {target} of complex numbers cannot be compiled. "
                f"{known(str(target)) or 'Write it as a function of the real and the imaginary part (z.real, z.imag)'}"
            )
        return _cast(pair_rules()[target](*args, **kwargs), example)


def _cast(result: Any, like: Any) -> Any:
    """Cast `result` to the dtype of `like`, the operator's own result; a pair to the dtype of its parts."""
    if isinstance(result, Pair):
        return result.map(lambda t: t.to(real_dtype(like.dtype)))
    if isinstance(result, torch.Tensor):
        return result.to(like.dtype)
    if isinstance(result, list | tuple):
        return type(result)(_cast(r, v) for r, v in zip(result, like, strict=True))
    return result
