"""Common subexpression elimination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.passes.base import Context, OfAnySize, PassResult


@dataclass(frozen=True)
class CommonSubexpressions(OfAnySize):
    """Compute a value once if several nodes compute it.

    Before:
        a = exp(x); b = exp(x); c = a + b; return (c,)
    After:
        a = exp(x); c = a + a; return (c,)

    The method is global value numbering over the ordered list of nodes, in which every node dominates those after it
    (Muchnick, "Advanced Compiler Design and Implementation", 1997, section 12.4). The pass leaves random operators,
    operators that write, and control flow alone.
    """

    name: ClassVar[str] = "cse"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        merged = merge_common_subexpressions(graph)
        return PassResult(merged > 0, {"merged": merged})


PASS = CommonSubexpressions
