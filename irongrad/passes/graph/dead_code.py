"""Dead code elimination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.graph.cleanup import eliminate_dead_code
from irongrad.passes.base import Context, OfAnySize, PassResult


@dataclass(frozen=True)
class DeadCode(OfAnySize):
    """Drop nodes that no result depends on.

    Before:
        a = relu(x); b = sin(x); return (a,)
    After:
        a = relu(x); return (a,)

    Other passes leave such nodes behind. Placeholders stay, because they are the signature. So do nodes that are not
    pure.
    """

    name: ClassVar[str] = "dce"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        removed = eliminate_dead_code(graph)
        return PassResult(removed > 0, {"removed": removed})


PASS = DeadCode
