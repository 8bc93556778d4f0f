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
    """Rewrite expressions to their simplest form with the rules of `passes/rules`, until no rule applies.

    Before:
        a = permute(w, [1, 0]); b = permute(a, [1, 0]); c = mul(b, 1); d = alias(c); return (d,)
    After:
        return (w,)

    A rule holds for every number, including infinities, nan and -0.0, or it is marked as rounding differently. So `x +
    0` stays (-0.0 + 0 is 0.0), and so does `x * 0`. No rule adds work if other users need the nodes that it matches.
    The pass drops nodes that rules leave without users. Earlier dead nodes are left to dead code elimination. Rules
    that need sizes as numbers are skipped in graphs whose sizes are symbols.
    """

    name: ClassVar[str] = "simplify"

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        symbolic = any(has_symbols(node.meta.get("val")) for node in graph.graph.nodes)
        applied = apply_rules(graph, [rule for rule in RULES if not (symbolic and rule.sized)])
        return PassResult(bool(applied), dict(applied))


PASS = Simplify
