"""Complex values out of a graph: each becomes its real and its imaginary part.

torch-mlir 20261001 has no lowering for most complex operators, and IREE 3.13.0 no complex matrix product, so
nothing after this stage sees a complex number. `irongrad.operators.decompositions.pairs` has the operators on pairs.
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

    Raises:
        CaptureError: with the name of the first, and what to do instead.
    """
    for name, tensor in tensors.items():
        if tensor.is_complex() and not gathers():  # then `legality` names all of them, with all else
            raise CaptureError(f"{name!r} is a complex tensor, which no artifact can hold. {_AS_REAL}")


def has_complex(graph: GraphModule) -> bool:
    """Whether any value in `graph` is complex."""
    return any(_is_complex(n.meta.get("val")) for n in graph.graph.nodes)


def in_reals(graph: GraphModule) -> GraphModule:
    """The same function without complex values inside; `graph` itself where there are none.

    Args:
        graph: a graph of ATen operators, with what they return in its nodes' `meta`. Its arguments are real.

    Raises:
        CaptureError: a result is complex.
        UnsupportedOpError: an operator that has no rule for complex numbers; with the user's line.
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
    # In-place operators go first: a pair has no memory that views of it could share.
    functional = traced(functionalize(lambda *v: list(interpret_eager(graph, v))), examples, _expansions())
    _without_interleaving(functional)

    def run(*values: torch.Tensor) -> list[Any]:
        results = _InPairs(functional).run(*values, enable_io_processing=False)
        return [r.re if isinstance(r, Pair) else r for r in results]  # of one that is refused, its real part

    return traced(run, examples, {})


def at_fixed_sizes(graph: GraphModule, symbols: Collection[Any]) -> GraphModule:
    """`in_reals`, of a graph of fixed sizes.

    Raises:
        UnsupportedOpError: complex values in a graph with named dimensions.
    """
    if symbols and has_complex(graph):
        raise UnsupportedOpError("a step with dynamic dimensions cannot have complex values inside; leave out dynamic")
    return in_reals(graph)


def _is_complex(value: Any) -> bool:
    """Whether there is a complex tensor or number, or a pair, in `value`."""
    dtypes = [v.dtype for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
    return any(d.is_complex for d in dtypes) or any(isinstance(v, complex | Pair) for v in tree_leaves(value))


def _expansions() -> dict[Operator, Decomposition]:
    """PyTorch's own decompositions, of complex operators that have no rule."""

    def of_complex(function: Callable[..., Any]) -> Decomposition:
        return lambda *a, **k: function(*a, **k) if _is_complex((a, k)) else NotImplemented

    known = torch._decomp.decomposition_table
    return {op: of_complex(f) for op, f in known.items() if op not in pair_rules()}


def _without_interleaving(graph: GraphModule) -> None:
    """Make view_as_real(z)[..., i] the part itself, and in its backward the part's gradient a part."""
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
    """Whether a select is along the last dimension."""
    source, dim, _ = select.args
    ndim = source.meta["val"].ndim
    return bool(dim % ndim == ndim - 1)


class _InPairs(Portable):
    """Runs a functional graph with a pair for each complex value."""

    def placeholder(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split an argument that is complex, and refused."""
        value = super().placeholder(target, args, kwargs)
        return Pair(*torch.view_as_real(value).unbind(-1)) if _is_complex(value) else value

    def stand_in(self, value: Any) -> Any:
        """A pair, of what is complex."""
        made = super().stand_in(value)
        if isinstance(made, torch.Tensor) and made.is_complex():
            return Pair(*(torch.empty(made.shape, dtype=real_dtype(made.dtype)) for _ in range(2)))
        return made

    def get_attr(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split a constant."""
        value = super().get_attr(target, args, kwargs)
        if not _is_complex(value):
            return value
        with _disable_current_modes():
            return Pair(*(part.contiguous() for part in torch.view_as_real(value.resolve_conj()).unbind(-1)))

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on pairs where it takes or makes complex values."""
        made = self.node.meta.get("val")
        if not isinstance(target, torch._ops.OpOverload) or not _is_complex((args, kwargs, made)):
            return super().call_function(target, args, kwargs)
        if target not in pair_rules():
            raise UnsupportedOpError(
                f"{source_lines.line_of(self.node)}\n  {target} of complex numbers cannot be compiled. "
                f"{known(str(target)) or 'Write it as a function of the real and the imaginary part (z.real, z.imag)'}"
            )
        return _cast(pair_rules()[target](*args, **kwargs), made)


def _cast(result: Any, like: Any) -> Any:
    """`result` in the dtype of what the operator makes of complex tensors."""
    if isinstance(result, Pair):
        return result.map(lambda t: t.to(real_dtype(like.dtype)))
    if isinstance(result, torch.Tensor):
        return result.to(like.dtype)
    if isinstance(result, list | tuple):
        return type(result)(_cast(r, v) for r, v in zip(result, like, strict=True))
    return result
