"""Common subexpression elimination."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from irongrad.graph.nodes import replace
from irongrad.graph.purity import is_mergeable
from irongrad.passes.base import Context, OfAnySize, PassResult


@dataclass(frozen=True)
class CommonSubexpressions(OfAnySize):
    """Compute a value once that several nodes compute alike.

    Before:
        a = exp(x); b = exp(x); c = a + b; return (c,)
    After:
        a = exp(x); c = a + a; return (c,)

    By global value numbering over a list of nodes in order, as all of them dominate what follows (Muchnick, "Advanced
    Compiler Design and Implementation", 1997, section 12.4). Random and writing operators and control flow are left as
    they are.
    """

    name: ClassVar[str] = "cse"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        return merge_common_subexpressions(graph)


def merge_common_subexpressions(graph: GraphModule) -> PassResult:
    """Replace every node by the first that computes the same."""
    first: dict[Hashable, Node] = {}
    merged = 0
    for node in list(graph.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not is_mergeable(node):
            continue
        known = first.setdefault((node.op, node.target, _key(node.args), _key(node.kwargs)), node)
        if known is not node:
            replace(node, known)
            merged += 1
    return PassResult(merged > 0, {"merged": merged})


def _key(value: Any) -> Hashable:
    """Equal for equal arguments. Python takes 1, 1.0 and True for equal, and 0.0 and -0.0; an operator may not."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return value if isinstance(value, Node) else (type(value), repr(value))


PASS = CommonSubexpressions
