"""Complex values out of a graph: each becomes its real and its imaginary part.

torch-mlir 20261001 has no lowering for most complex operators, and IREE 3.13.0 no complex matrix product, so
nothing after this stage sees a complex number. `irongrad.decompositions.pairs` has the operators on pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.node import Target
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from irongrad.decompositions.pairs import Pair, pair_rules
from irongrad.decompositions.pairs.pair import real_dtype
from irongrad.decompositions.registry import Decomposition, Operator
from irongrad.pipeline import usercode
from irongrad.pipeline.hints import known
from irongrad.pipeline.retrace import Portable, interpret_eager, traced
from irongrad.runtime.errors import CaptureError, UnsupportedOpError

aten = torch.ops.aten

AS_REAL = "pass torch.view_as_real(z), whose last dimension holds the real and the imaginary part"


def in_reals(graph: GraphModule) -> GraphModule:
    """The same function without complex values inside; `graph` itself where there are none.

    Raises:
        CaptureError: an argument or a result is complex.
        UnsupportedOpError: an operator that has no rule for complex numbers; with the user's line.
    """
    if not any(_is_complex(n.meta.get("val")) for n in graph.graph.nodes):
        return graph
    _refuse_complex_interface(graph)
    examples = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    # In-place operators go first: a pair has no memory that views of it could share.
    functional = traced(functionalize(lambda *v: list(interpret_eager(graph, v))), examples, _expansions())
    _without_interleaving(functional)
    return traced(lambda *v: list(_InPairs(functional).run(*v, enable_io_processing=False)), examples, {})


def _refuse_complex_interface(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "placeholder" and _is_complex(node.meta["val"]):
            raise CaptureError(f"{node.name}: an argument or a tensor of the state is complex; {AS_REAL}")
        if node.op == "output":
            for result in tree_leaves(node.args[0]):
                if isinstance(result, Node) and _is_complex(result.meta["val"]):
                    raise CaptureError(f"{usercode.line_of(result)}\n  a result is complex; {AS_REAL}")


def _is_complex(value: Any) -> bool:
    leaves = tree_leaves(value)
    return any(v.dtype.is_complex if isinstance(v, torch.Tensor) else isinstance(v, complex) for v in leaves)


def _expansions() -> dict[Operator, Decomposition]:
    """PyTorch's own decompositions, of complex operators that have no rule."""

    def of_complex(function: Callable[..., Any]) -> Decomposition:
        return lambda *a, **k: function(*a, **k) if _is_complex((a, k)) else NotImplemented

    known = torch._decomp.decomposition_table
    return {op: of_complex(f) for op, f in known.items() if op not in pair_rules()}


def _without_interleaving(graph: GraphModule) -> None:
    """Make view_as_real(z)[..., i] the part itself, and view_as_complex of one part's gradient a pair with zeros."""
    for node in graph.graph.nodes:
        if node.target is aten.select.int and _is_last(node.args[0], node.args[1]):
            source, _, index = node.args
            if source.target is aten.view_as_real.default:
                node.target = (aten.real.default, aten.imag.default)[index]
                node.args = source.args
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_last(node: Node, dim: int) -> bool:
    return dim % node.meta["val"].ndim == node.meta["val"].ndim - 1


class _InPairs(Portable):
    """Runs a functional graph with a pair for each complex value."""

    def run_node(self, n: Node) -> Any:
        """Run one node; remember it for what `call_function` needs of it."""
        self.node = n
        return super().run_node(n)

    def get_attr(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split a constant."""
        value = super().get_attr(target, args, kwargs)
        if not _is_complex(value):
            return value
        with _disable_current_modes():
            return Pair(*(part.contiguous() for part in torch.view_as_real(value.resolve_conj()).unbind(-1)))

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on pairs where it takes or makes complex values."""
        node = self.node
        values = (node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes], node.args, node.kwargs)
        if not isinstance(target, torch._ops.OpOverload) or not _is_complex(values):
            return super().call_function(target, args, kwargs)
        if target not in pair_rules():
            raise UnsupportedOpError(
                f"{usercode.line_of(node)}\n  {target} of complex numbers cannot be compiled. "
                f"{known(str(target)) or 'Write it as a function of the real and the imaginary part (z.real, z.imag)'}"
            )
        return _cast(pair_rules()[target](*args, **kwargs), node.meta.get("val"))


def _cast(result: Any, like: Any) -> Any:
    """`result` in the dtype of what the operator makes of complex tensors."""
    if isinstance(result, Pair):
        return result.map(lambda t: t.to(real_dtype(like.dtype)))
    if isinstance(result, torch.Tensor):
        return result.to(like.dtype)
    if isinstance(result, list | tuple):
        return type(result)(_cast(r, v) for r, v in zip(result, like, strict=True))
    return result
