"""Dead code elimination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.graph.cleanup import eliminate_dead_code
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
        removed = eliminate_dead_code(graph)
        return PassResult(removed > 0, {"removed": removed})


PASS = DeadCode
