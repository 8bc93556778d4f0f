"""Clamp the indices that are computed from floats.

A float may be NaN, which is no index, and the code that computes an index early may round differently. In both cases
the clamped index at least stays within its tensor. Where an index is in range, the clamp changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Node

from irongrad.pipeline.guards.bound_rules.positions import WITH_PLACES
from irongrad.pipeline.guards.early_checks import within
from irongrad.pipeline.guards.index_uses import Use, operator_name, uses_of

# Results of these are places or counts, whatever floats they are made from.
_PLACES = WITH_PLACES | {"argmax", "argmin", "argsort", "searchsorted", "bucketize", "multinomial", "count_nonzero"}


def float_indices(nodes: Iterable[Node], makers: Callable[[Any], list[Any]], opaque: Collection[Node]) -> Iterator[Use]:
    """Yield each index that is computed from floats, or from memory that is written; none into sizes that vary.

    Args:
        nodes: the nodes of a program, with those of regions.
        makers: the nodes that compute a value, through the borders of regions.
        opaque: the nodes whose memory is written.
    """
    for node in nodes:
        for use in uses_of(node):
            if isinstance(use.limit, int) and _is_from_floats(use.index, makers, opaque):
                yield use


def clamp(uses: Iterable[Use]) -> None:
    """Clamp indices where they are used, in place."""
    for use in list(uses):
        with use.node.graph.inserting_before(use.node):
            use.node.replace_input_with(use.index, within(use, use.index, partial(_call, use)))


def _is_from_floats(index: Node, makers: Callable[[Any], list[Any]], opaque: Collection[Node]) -> bool:
    seen, waiting = set[Node](), [n for n in makers(index) if isinstance(n, Node)]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("val")
        if node in opaque:
            return True
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
            continue
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            return True
        if operator_name(node) not in _PLACES:
            waiting += [m for n in node.all_input_nodes for m in makers(n) if isinstance(m, Node)]
    return False


def _call(use: Use, target: Callable[..., Any], *arguments: Any) -> Node:
    node = use.node.graph.call_function(target, arguments)
    node.meta = {key: use.node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in use.node.meta}
    plain = torch.fx.node.map_arg(arguments, lambda n: n.meta["val"])
    mode = detect_fake_mode([v for v in plain if isinstance(v, torch.Tensor)])
    assert mode is not None
    with mode, torch.no_grad():
        node.meta["val"] = target(*plain)
    return node
