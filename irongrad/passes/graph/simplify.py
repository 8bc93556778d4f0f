"""Algebraic simplification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from irongrad.passes.base import Context, OfAnySize, PassResult
from irongrad.passes.rules import RULES, apply_rules
from irongrad.sizes.symbols import has_symbols


@dataclass(frozen=True)
class Simplify(OfAnySize):
    """Write expressions in their simplest form, by the tables of `passes/rules`, until none applies.

    Before:
        a = permute(w, [1, 0]); b = permute(a, [1, 0]); c = mul(b, 1); d = alias(c); return (d,)
    After:
        return (w,)

    A rule holds for every number there is, infinities, nan and -0.0 included, or says that it rounds differently; so
    `x + 0` stays (-0.0 + 0 is 0.0), and `x * 0` does. None makes more work where another user needs what it looks
    into. What rules leave without users goes; what was dead before is left to dead code elimination. Rules that take
    sizes for numbers are left out where these are symbols.
    """

    name: ClassVar[str] = "simplify"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        symbolic = any(has_symbols(node.meta.get("val")) for node in graph.graph.nodes)
        applied = apply_rules(graph, [rule for rule in RULES if not (symbolic and rule.sized)])
        return PassResult(bool(applied), dict(applied))


PASS = Simplify
