"""Dead code elimination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.graph.purity import is_pure
from irongrad.passes.base import Context, OfAnySize, PassResult


@dataclass(frozen=True)
class DeadCode(OfAnySize):
    """Drop nodes whose value no result depends on.

    Before:
        a = relu(x); b = sin(x); return (a,)
    After:
        a = relu(x); return (a,)

    The other passes leave such nodes where they write others. Placeholders stay, since they are the signature.
    Nothing is refused; a node that is not pure stays.
    """

    name: ClassVar[str] = "dce"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        return eliminate_dead_code(graph)


def eliminate_dead_code(graph: GraphModule) -> PassResult:
    """Drop pure nodes without users, from the last to the first, and the bodies that only they named."""
    removed = 0
    for node in reversed(graph.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and is_pure(node):
            graph.graph.erase_node(node)
            removed += 1
    named = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [n for n, _ in graph.named_children() if n not in named]:
        graph.delete_submodule(name)
    return PassResult(removed > 0, {"removed": removed})


PASS = DeadCode
