"""Common subexpression elimination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.graph.cleanup import merge_common_subexpressions
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
        merged = merge_common_subexpressions(graph)
        return PassResult(merged > 0, {"merged": merged})


PASS = CommonSubexpressions
