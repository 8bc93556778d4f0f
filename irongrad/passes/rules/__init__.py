"""Algebraic rules, in one table for each kind, and their application to a graph until none applies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from irongrad.passes.rules import arithmetic, one_hot, parts, products, views
from irongrad.passes.rules.patterns import Rule, drop

RULES: tuple[Rule, ...] = (*arithmetic.RULES, *views.RULES, *parts.RULES, *one_hot.RULES, *products.RULES)


def apply_rules(graph: GraphModule, rules: Sequence[Rule]) -> Counter[str]:
    """Apply `rules` to the nodes of `graph` until none applies.

    Returns:
        How often each rule was applied, by its name.
    """
    by_operator: dict[Any, list[Rule]] = defaultdict(list)
    for rule in rules:
        for operator in rule.expression.family.operators:
            by_operator[operator].append(rule)
    applied: Counter[str] = Counter()
    while sum(_rewrite_once(graph.graph, node, by_operator, applied) for node in list(graph.graph.nodes)):
        pass
    return applied


def _rewrite_once(graph: Graph, node: Node, rules: dict[Any, list[Rule]], applied: Counter[str]) -> bool:
    """Apply the first applicable rule to `node`, unless `node` is already erased."""
    if node._erased:
        return False
    for rule in rules.get(node.target, ()):
        if (new := rule.apply(graph, node)) is not None:
            node.replace_all_uses_with(new)
            drop(node, keep=new)
            applied[rule.name] += 1
            return True
    return False
