"""Which nodes only compute a value, and so may be merged, moved, or dropped."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node
from torch.fx.node import Target

from irongrad.graph.over_ranks import OVER_RANKS


def is_pure(node: Node) -> bool:
    """Whether `node` gives the same value whenever it is computed, and does nothing else.

    By the operator's schema, which tells writes, and its tags, which tell random operators. One that returns nothing is
    there for what else it does. Control flow is pure: its bodies are graphs that the verifier holds to the same rules.
    """
    return node.op == "get_attr" or _only_computes(node.target)


@cache
def _only_computes(target: Target) -> bool:
    if target is operator.getitem or isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload):
        return False
    schema = target._schema
    return bool(schema.returns) and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def is_mergeable(node: Node) -> bool:
    """Whether another node with the same operator and arguments, or a constant, can stand for `node`."""
    return is_pure(node) and not isinstance(node.target, HigherOrderOperator) and node.target is not OVER_RANKS
