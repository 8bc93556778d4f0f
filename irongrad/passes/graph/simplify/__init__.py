"""Algebraic simplification."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node

from irongrad.passes.base import Context, OfAnySize, PassResult
from irongrad.passes.graph.simplify import arithmetic, parts, views
from irongrad.passes.graph.simplify.patterns import Rule, drop
from irongrad.sizes.symbols import has_symbols

RULES: tuple[Rule, ...] = (*arithmetic.RULES, *views.RULES, *parts.RULES)


@dataclass(frozen=True)
class Simplify(OfAnySize):
    """Write expressions in their simplest form, by the tables of rules in this folder, until none applies.

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
        return simplify(graph, [rule for rule in RULES if not (symbolic and rule.sized)])


def simplify(graph: GraphModule, rules: Sequence[Rule]) -> PassResult:
    """Apply `rules` to the nodes of `graph` until none applies."""
    by_operator: dict[Any, list[Rule]] = defaultdict(list)
    for rule in rules:
        for operator in rule.expression.family.operators:
            by_operator[operator].append(rule)
    applied: Counter[str] = Counter()
    while sum(_rewrite_once(graph.graph, node, by_operator, applied) for node in list(graph.graph.nodes)):
        pass
    return PassResult(bool(applied), dict(applied))


def _rewrite_once(graph: Graph, node: Node, rules: dict[Any, list[Rule]], applied: Counter[str]) -> bool:
    """Apply the first rule that can be to `node`, unless it is gone already."""
    if node._erased:
        return False
    for rule in rules.get(node.target, ()):
        if (new := rule.apply(graph, node)) is not None:
            node.replace_all_uses_with(new)
            drop(node, keep=new)
            applied[rule.name] += 1
            return True
    return False


PASS = Simplify
