"""Keep quantised weights for the backward, instead of the wide weights that the forward computes from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, GraphModule, Node

from irongrad.graph.step_graph import base_name
from irongrad.memory_model.kernel_roles import bytes_of, inputs_of, is_constant, is_pointwise, is_view
from irongrad.memory_model.packed_operands import packs
from irongrad.passes.base import Context, OfAnySize, PassResult
from irongrad.passes.recompute import is_backward, is_forward, recompute
from irongrad.sizes.symbols import has_symbols

# The fewest bytes that a recomputed tensor takes more than what it is computed from.
_LEAST = 1 << 14


@dataclass(frozen=True)
class RecomputeDequantised(OfAnySize):
    """Compute wide weights from quantised ones again in the backward, instead of keeping them for it.

    Before:
        w = convert(q, float32) * s; y = x @ w.T; --- backward --- g = dy @ w
    After:
        w = convert(q, float32) * s; y = x @ w.T; --- backward --- v = convert(tied q, float32) * s; g = dy @ v

    Without the pass a step holds every weight in float32 from its forward to its backward, which is what quantisation
    should save. A wide weight is any value that is computed element by element from the state alone, and takes more
    memory than the state that it is computed from.

    Holds before: nodes of the backward are marked. Left alone: weights that the backward does not read, and values
    computed with a reduction or a product. The copies compute the same bits (`passes/recompute.py`).
    """

    name: ClassVar[str] = "recompute-dequantised"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        if base_name(context.function) != "joint" or not context.arguments:  # bodies of control flow have no arguments
            return PassResult(False)
        inputs = graph.graph.find_nodes(op="placeholder")
        state = {n for n, v in zip(inputs, context.arguments, strict=True) if v.kind == "state"}
        wide = _dequantised(graph.graph, state)
        if not any(is_backward(user) for node in wide for user in node.users):
            return PassResult(False)
        saved = {n for n in graph.graph.nodes if is_forward(n) and n not in wide}
        copies = recompute(graph.graph, saved, packed=packs(context.targets), by=self.name)
        graph.graph.eliminate_dead_code()
        return PassResult(bool(copies), {"recomputed": len(copies)})


def _dequantised(graph: Graph, state: set[Node]) -> set[Node]:
    """The nodes that compute wide weights from the tensors `state`, and the views of those weights."""
    reads: dict[Node, frozenset[Node]] = {n: frozenset([n]) for n in state}
    found: set[Node] = set()
    for node in graph.nodes:
        if not is_forward(node) or is_constant(node) or not (is_pointwise(node) or is_view(node)):
            continue
        operands = [n for n in inputs_of(node) if not is_constant(n)]
        if all(n in reads for n in operands):
            reads[node] = frozenset().union(*(reads[n] for n in operands))
            if not has_symbols(node.meta["val"]) and bytes_of(node) - sum(map(bytes_of, reads[node])) >= _LEAST:
                found.add(node)
    return found


PASS = RecomputeDequantised
